"""Shows long-lived sessions: stop, automatic start, archive and clone."""

from atoll import Atoll

with Atoll() as atoll:
    session = atoll.sessions.create(timeout=600, idle_timeout=300, labels={"project": "report"})
    try:
        session.run("open('notes.txt', 'w').write('day 1')").check()

        # Stopping ends the processes and keeps the files.
        print(session.stop().status, session.info.cause)

        # Running code starts the session again.
        print(session.run("print(open('notes.txt').read())").check().stdout, end="")
        print(session.refresh().status)

        # Archiving moves the files to the blob store; reading them still works.
        print(session.archive().status)
        print(session.files.read_text("notes.txt"))

        # A clone starts with the same files. Changes affect only one of the two.
        copy = session.clone(labels={"project": None, "draft": "b"})
        copy.files.write("notes.txt", "day 1, again")
        print(copy.info.labels, copy.files.read_text("notes.txt"))
        print(session.info.labels, session.files.read_text("notes.txt"))
        copy.delete()
    finally:
        print(session.delete().status)
