"""Output as it comes, input while it runs, and an end when enough was seen."""

from atoll import Atoll

ECHO = """
for line in iter(input, "bye"):
    print("heard", line, flush=True)
"""
FOREVER = """
import itertools
for n in itertools.count():
    print(n, flush=True)
"""

with Atoll() as atoll, atoll.session() as session:
    # The short form: functions that are given what is written.
    session.run("print('hello')", on_stdout=lambda text: print(text, end=""))

    # Every event, and an answer to what was heard.
    for event in session.stream(ECHO, stdin="one\n", stdin_open=True):
        if event.kind == "stdout":
            print(event.text, end="")
            session.execution(event.execution_id).write("bye\n")
        if event.result is not None:
            print(event.result.status)

    # Who leaves the loop cancels what runs.
    said = ""
    for event in session.stream(FOREVER):
        said += event.text
        if "10\n" in said:
            break
    print(session.execution(event.execution_id).status().status)
