"""A session that rests between the times it is needed: stopped, archived, and copied."""

from atoll import Atoll

with Atoll() as atoll:
    session = atoll.sessions.create(timeout=600, idle_timeout=300, labels={"project": "report"})
    try:
        session.run("open('notes.txt', 'w').write('day 1')").check()

        # Nobody needs it: its processes end, its files stay.
        print(session.stop().status, session.info.cause)

        # Whatever is run in it starts it again.
        print(session.run("print(open('notes.txt').read())").check().stdout, end="")
        print(session.refresh().status)

        # For longer: its files move to the blob store, and come back from there.
        print(session.archive().status)
        print(session.files.read_text("notes.txt"))

        # Another one with the same files, which go their own way from now on.
        copy = session.clone(labels={"project": None, "draft": "b"})
        copy.files.write("notes.txt", "day 1, again")
        print(copy.info.labels, copy.files.read_text("notes.txt"))
        print(session.info.labels, session.files.read_text("notes.txt"))
        copy.delete()
    finally:
        print(session.delete().status)
