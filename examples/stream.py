"""Shows live output: a callback, a stream of events with input, and cancelling early."""

from atoll import Atoll

ECHO = """
for line in iter(input, "bye"):
    print("received", line, flush=True)
"""
FOREVER = """
import itertools
for n in itertools.count():
    print(n, flush=True)
"""

with Atoll() as atoll, atoll.session() as session:
    # A callback receives output while the code runs.
    session.run("print('hello')", on_stdout=lambda text: print(text, end=""))

    # A stream yields all events. Here the first output is answered with input.
    for event in session.stream(ECHO, stdin="one\n", stdin_open=True):
        if event.kind == "stdout":
            print(event.text, end="")
            session.execution(event.execution_id).write("bye\n")
        if event.result is not None:
            print(event.result.status)

    # Leaving the loop cancels the execution.
    output = ""
    for event in session.stream(FOREVER):
        output += event.text
        if "10\n" in output:
            break
    print(session.execution(event.execution_id).status().status)
