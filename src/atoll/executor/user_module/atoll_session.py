"""
Lets code in an Atoll sandbox ask a person, receive messages, and stage files.

    import atoll_session

    if atoll_session.ask("Delete 12 files?", {"files": names}):
        ...
    for text in atoll_session.messages(wait=5):
        ...
    open(atoll_session.staging() + "/report.csv", "w")

and from the shell `atoll-session ask|messages|staging`. Works in every process of an execution, in
threads, and concurrently. Every call ends.
"""

from __future__ import annotations

# Not `socket`: it takes longer to import than all of this module to run.
import _socket
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Generator

    execution_id: str
    invocation_id: str

__all__ = [
    "Answer",
    "Unavailable",
    "ask",
    "execution_id",
    "invocation_id",
    "messages",
    "staging",
]

ADDRESS = "\0atoll"
PATIENCE = 10.0
"""Seconds beyond the requested time after which the executor counts as lost."""
EXIT_REFUSED, EXIT_UNAVAILABLE = 1, 3


class Unavailable(RuntimeError):
    """The executor cannot be reached or rejects the request; `code` tells why."""

    def __init__(self, message: str, code: str = "unavailable") -> None:
        super().__init__(message)
        self.code = code


class Answer:
    """True when approved."""

    __slots__ = ("answer", "approved", "reason")

    def __init__(self, approved: bool, answer: Any = None, reason: str | None = None) -> None:
        self.approved = approved
        self.answer = answer
        """The answer beyond yes or no: any JSON value, or None."""
        self.reason = reason
        """
        Why it was refused: "timeout", "cancelled", "shutdown", "ended", or the person's own reason.
        """

    def __bool__(self) -> bool:
        return self.approved

    def __repr__(self) -> str:
        fields = (self.approved, self.answer, self.reason)
        return "Answer(approved=%r, answer=%r, reason=%r)" % fields


def ask(question: str, data: Any = None, *, timeout: float | None = None) -> Answer:
    """
    Ask a person and wait for the answer.

    The question is refused if there is no answer within `timeout` seconds (300 at most and by
    default), or if the execution is cancelled or its sandbox shut down. Question and data (any JSON
    value) have at most 64 KiB together.
    """
    lines = _talk({"op": "ask", "question": question, "data": data, "timeout": timeout}, PATIENCE)
    first = next(lines)
    if "timeout" in first:
        # The question was accepted; the executor refuses it when its time is over.
        first = lines.send(first["timeout"] + PATIENCE)
    return Answer(bool(first["approved"]), first.get("answer"), first.get("reason"))


def messages(wait: float = 0.0) -> list[str]:
    """Unread messages to this execution; waits up to `wait` seconds for the first."""
    found: list[str] = []
    while True:
        seconds = 0.0 if found else max(0.0, wait)
        reply = next(_talk({"op": "messages", "wait": seconds}, seconds + PATIENCE))
        found += reply["messages"]
        if not reply["more"]:
            return found


def staging() -> str:
    """
    The staging directory of this execution: its content is moved into the workspace when the
    execution succeeds, and removed otherwise.
    """
    return _variable("ATOLL_STAGING", "has no staging area: another file is called /workspace/.tmp")


def __getattr__(name: str) -> str:
    # Read each time: one process may run several executions in turn.
    if name == "execution_id":
        return _variable("ATOLL_EXECUTION_ID", "has no execution")
    if name == "invocation_id":
        return _variable("ATOLL_INVOCATION_ID", "has no invocation")
    raise AttributeError("module 'atoll_session' has no attribute %r" % name)


def _variable(name: str, words: str) -> str:
    value = os.environ.get(name)
    if value:
        return value
    if "ATOLL_EXECUTION_ID" in os.environ:
        raise Unavailable("This sandbox %s (%s is not set)." % (words, name))
    raise Unavailable("This is not an Atoll sandbox: %s is not set." % name)


def _talk(request: dict[str, Any], patience: float) -> Generator[Any, float, None]:
    """
    Send a request and yield the replies; send a value to the generator to set how long to wait for
    the next one.
    """
    import json
    import struct

    line = json.dumps(request, ensure_ascii=False, allow_nan=False)
    peer = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        # With a time-out of Python's, connect would not wait for a place in the queue at all.
        limit = struct.pack("ll", int(PATIENCE), 0)
        peer.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDTIMEO, limit)
        try:
            peer.connect(ADDRESS)
        except BlockingIOError:
            raise Unavailable("The sandbox is busy. Retry later.", "busy") from None
        except OSError as error:
            message = "This is not an Atoll sandbox: cannot connect (%s)." % error.strerror
            raise Unavailable(message) from None
        try:
            peer.sendall(line.encode("utf-8", "surrogatepass") + b"\n")
        except OSError:
            pass  # Refused before it was read; the reply says why.
        buffer = b""
        while True:
            peer.settimeout(patience)
            while b"\n" not in buffer:
                try:
                    data = peer.recv(262_144)
                except OSError:
                    data = b""
                if not data:
                    raise Unavailable("The sandbox does not answer.", "lost")
                buffer += data
            line_, _, buffer = buffer.partition(b"\n")
            reply = json.loads(line_.decode("utf-8", "surrogatepass"))
            if "error" in reply:
                raise Unavailable(reply["message"], reply["error"])
            patience = yield reply
    finally:
        peer.close()


def _main(arguments: list[str]) -> int:
    import argparse
    import json
    import sys

    parser = argparse.ArgumentParser(
        prog="atoll-session",
        description="Talk to the person who runs this. Exit code 0: approved, or done; 1: refused;"
        " 2: wrong arguments; 3: not in an execution of an Atoll sandbox, or not accepted.",
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    commands.required = True
    asking = commands.add_parser("ask", help="ask a question, wait, print the answer")
    asking.add_argument("question")
    asking.add_argument("--data", type=json.loads, metavar="JSON", help="shown with the question")
    asking.add_argument("--timeout", type=float, metavar="SECONDS", help="at most 300")
    reading = commands.add_parser("messages", help="print new messages, one JSON string a line")
    reading.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="for the first")
    commands.add_parser("staging", help="print the path of the staging area")
    options = parser.parse_args(arguments)
    try:
        if options.command == "staging":
            sys.stdout.write(staging() + "\n")
        elif options.command == "messages":
            for text in messages(options.wait):
                sys.stdout.write(json.dumps(text) + "\n")
        else:
            answer = ask(options.question, options.data, timeout=options.timeout)
            if answer.answer is not None:
                plain = isinstance(answer.answer, str)
                words = answer.answer if plain else json.dumps(answer.answer)
                sys.stdout.write(words + "\n")
            if not answer:
                sys.stderr.write("atoll-session: refused: %s\n" % (answer.reason or "no"))
                return EXIT_REFUSED
    except (Unavailable, ValueError) as error:
        sys.stderr.write("atoll-session: %s\n" % error)
        return EXIT_UNAVAILABLE
    return 0


if __name__ == "__main__":
    import sys

    sys.exit(_main(sys.argv[1:]))
