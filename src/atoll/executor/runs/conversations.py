"""
What user code says to a person and hears from one: questions that wait for an answer, and messages.

`user_module/atoll_session.py` is the client. It opens a connection for each request, over an
abstract unix socket: such names belong to the sandbox's network namespace and cannot be unlinked.
The kernel reports which process connects, and so which run the request concerns. Every question
ends: by an answer, its time-out, the end of its run, or the end of the process that asked.

Everything is bounded, because user code calls: connections, how often one is taken, bytes of a
request, questions of a run and their bytes in its log, messages and theirs.
"""

from __future__ import annotations

import _socket
import os
import struct

from ...protocol import frames, minijson
from ...protocol.limits import MAX_APPROVAL_BYTES
from ..connection import Stream
from ..event_loop import READ, WRITE, Loop, Timer
from .runs import Run, Runs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

SO_PEERCRED = 17
APPROVAL_SECONDS = 300.0
MAX_REQUEST = 96 * 1024
MAX_CONNECTIONS = 64
BURST = 100
BURST_SECONDS = 0.1
"""So many connections are taken in this time; PID 1 has other things to do."""
MAX_WAIT_SECONDS = 3600.0
IDLE_SECONDS = 10.0
"""For a peer to send its request, and to take its reply."""
MAX_ENTRY = frames.CHUNK
"""Bytes of one entry in the log, which has to fit into what a stream may send at once."""
MAX_QUESTION = MAX_ENTRY - 256
"""The control plane, which has the same bound, puts a little to it."""
MAX_OPEN = 8
MAX_QUESTIONS = 1000
MAX_MESSAGES = 1000
MAX_MESSAGE = 64 * 1024
"""Characters, as the API counts them."""
MAX_WAITING = 8 * 1024 * 1024
"""Bytes of all messages of a run that nobody has read."""
BATCH = 256 * 1024
"""Bytes of messages in one reply."""


class Peer:
    """One call of user code."""

    __slots__ = ("leave", "out", "replied", "run", "said", "socket", "timer")

    def __init__(self, socket: _socket.socket, run: Run) -> None:
        self.socket = socket
        self.run = run
        self.said: bytearray | None = bytearray()
        """What came of the request; None when it is complete."""
        self.out = b""
        self.replied = False
        """Whether `out` ends the call."""
        self.timer: Timer | None = None
        self.leave: Callable[[], None] | None = None
        """What its going away means for what it waits for."""


class Question:
    __slots__ = ("id", "peer", "talk", "timer")

    def __init__(self, number: str, peer: Peer, talk: Talk) -> None:
        self.id = number
        self.peer = peer
        self.talk = talk
        self.timer: Timer | None = None


class Talk:
    """What is between a run and its people."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.questions: dict[str, Question] = {}
        self.asked = 0
        self.spent = 0
        self.messages: list[tuple[str, int]] = []
        self.size = 0
        self.readers: list[Peer] = []


class Conversations:
    def __init__(self, loop: Loop, runs: Runs) -> None:
        self._loop = loop
        self._runs = runs
        self._talks: dict[str, Talk] = {}
        self._peers: list[Peer] = []
        self._taken = 0
        self._refusing: str | None = None
        self._listener: _socket.socket | None = None
        self.operations: dict[str, Callable[[Stream, dict[str, Any]], None]] = {
            "answer": self._answer,
            "message": self._message,
        }

    def listen(self, name: str) -> None:
        self._listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind("\0" + name)
        self._listener.listen(MAX_CONNECTIONS)
        self._loop.add(self._listener.fileno(), READ, lambda mask: self._accept())

    def refuse_all(self, reason: str) -> None:
        """No question is answered any more, neither an open one nor one that is yet to come."""
        self._refusing = reason
        for talk in list(self._talks.values()):
            self._finish(talk, reason)

    # Peers

    def _accept(self) -> None:
        assert self._listener is not None
        if self._taken == 0:
            self._loop.after(BURST_SECONDS, self._breathe)
        self._taken += 1
        if self._taken == BURST:
            self._loop.remove(self._listener.fileno())
        try:
            fd, _ = self._listener._accept()  # type: ignore[attr-defined]
        except OSError:
            return  # Gone before it was taken.
        os.set_inheritable(fd, False)
        socket = _socket.socket(fileno=fd)
        socket.setblocking(False)
        pid = struct.unpack("3i", socket.getsockopt(_socket.SOL_SOCKET, SO_PEERCRED, 12))[0]
        if len(self._peers) >= MAX_CONNECTIONS:
            _dismiss(socket, "busy", "Too many processes talk to the outside at once.")
            return
        # 0 is a process of another PID namespace, which is in no run.
        run = self._runs.of_process(pid) if pid > 0 else None
        if run is None:
            _dismiss(socket, "no_execution", "This process belongs to no running execution.")
            return
        peer = Peer(socket, run)
        self._peers.append(peer)
        peer.timer = self._loop.after(IDLE_SECONDS, lambda: self._close(peer))
        self._loop.add(fd, READ, lambda mask: self._ready(peer, mask))

    def _breathe(self) -> None:
        assert self._listener is not None
        if self._taken >= BURST:
            self._loop.add(self._listener.fileno(), READ, lambda mask: self._accept())
        self._taken = 0

    def _ready(self, peer: Peer, mask: int) -> None:
        if mask & WRITE:
            self._flush(peer)
        if not mask & ~WRITE or peer.socket.fileno() < 0:
            return
        try:
            data = peer.socket.recv(MAX_REQUEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or peer.said is None:
            # It has left, or says more than it may.
            self._close(peer)
            return
        peer.said += data
        if b"\n" in data:
            self._heard(peer, bytes(peer.said))
        elif len(peer.said) > MAX_REQUEST:
            self._error(peer, "too_large", "A request has at most %d bytes." % MAX_REQUEST)

    def _heard(self, peer: Peer, line: bytes) -> None:
        peer.said = None
        self._stop_timer(peer)
        try:
            request = minijson.loads(line)
            if request["op"] == "ask":
                self._ask(peer, request)
            elif request["op"] == "messages":
                self._read(peer, request)
            else:
                raise ValueError("there is no such request")
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            words = "%s: %s" % (type(error).__name__, error)
            self._error(peer, "bad_request", "This is not a request: %s." % words)

    def _error(self, peer: Peer, code: str, message: str) -> None:
        self._reply(peer, {"error": code, "message": message})

    def _reply(self, peer: Peer, value: Any, last: bool = True) -> None:
        if peer.socket.fileno() < 0:
            return
        peer.out += minijson.dumps(value) + b"\n"
        peer.replied = last
        self._flush(peer)

    def _flush(self, peer: Peer) -> None:
        """Send what the peer takes now. A last reply that was taken is the end of the call."""
        try:
            while peer.out:
                peer.out = peer.out[peer.socket.send(peer.out) :]
        except BlockingIOError:
            self._loop.change(peer.socket.fileno(), READ | WRITE)
            if peer.replied:
                self._stop_timer(peer)
                peer.timer = self._loop.after(IDLE_SECONDS, lambda: self._close(peer))
            return
        except OSError:
            self._close(peer)
            return
        if peer.replied:
            peer.leave = None
            self._close(peer)
        else:
            self._loop.change(peer.socket.fileno(), READ)

    def _close(self, peer: Peer) -> None:
        if peer.socket.fileno() < 0:
            return
        self._stop_timer(peer)
        self._loop.remove(peer.socket.fileno())
        peer.socket.close()
        self._peers.remove(peer)
        leave, peer.leave = peer.leave, None
        if leave is not None:
            leave()

    @staticmethod
    def _stop_timer(peer: Peer) -> None:
        if peer.timer is not None:
            peer.timer.cancel()

    # Runs

    def _talk(self, run: Run) -> Talk:
        found = self._talks.get(run.id)
        if found is None:
            for over in [talk for talk in self._talks.values() if talk.run.result is not None]:
                del self._talks[over.run.id]
            found = talk = self._talks[run.id] = Talk(run)
            run.on_end.append(lambda: self._ended(talk))
        return found

    def _ended(self, talk: Talk) -> None:
        if self._talks.get(talk.run.id) is talk:
            del self._talks[talk.run.id]
        self._finish(talk, _words(talk.run))

    def _finish(self, talk: Talk, reason: str) -> None:
        for question in list(talk.questions.values()):
            self._refuse(question, reason)
        readers, talk.readers = talk.readers, []
        for reader in readers:
            self._hand_out(talk, reader)

    def _active(self, stream: Stream, request: dict[str, Any]) -> Run | None:
        """The run that the link asks about; None when it was told that there is none."""
        run = self._runs.get(request["id"])
        if run is None:
            stream.error("unknown_run", "no run %s is in the journal" % request["id"])
        elif run.over or run.reason is not None:
            stream.error("not_running", "run %s is over or being ended" % request["id"])
        else:
            return run
        return None

    # Questions

    def _ask(self, peer: Peer, request: dict[str, Any]) -> None:
        run, question, timeout = peer.run, request["question"], request.get("timeout")
        if not isinstance(question, str):
            raise TypeError("the question is not a text")
        seconds = float(run.request.get("approval_timeout", APPROVAL_SECONDS))
        if timeout is not None:
            seconds = max(0.0, min(seconds, _number(timeout)))
        if self._refusing is not None or run.reason is not None or run.over:
            reason = self._refusing or _words(run)
            self._reply(peer, {"approved": False, "answer": None, "reason": reason})
            return
        talk = self._talk(run)
        number = str(talk.asked + 1)
        entry = minijson.dumps(
            {
                "id": number,
                "state": "asked",
                "question": question,
                "data": request.get("data"),
                "timeout": seconds,
            }
        )
        if len(entry) > MAX_QUESTION:
            self._error(peer, "too_large", "A question has at most 64 KiB of JSON, data included.")
        elif len(talk.questions) >= MAX_OPEN:
            words = "This execution has %d open questions; no more are taken." % MAX_OPEN
            self._error(peer, "too_many_questions", words)
        elif talk.asked >= MAX_QUESTIONS or talk.spent + len(entry) > MAX_APPROVAL_BYTES:
            words = "This execution has asked too much already."
            self._error(peer, "too_many_questions", words)
        else:
            talk.asked += 1
            talk.spent += len(entry)
            asked = talk.questions[number] = Question(number, peer, talk)
            peer.leave = lambda: self._refuse(asked, "gone")
            asked.timer = self._loop.after(seconds, lambda: self._refuse(asked, "timeout"))
            self._runs.add_entry(run, frames.APPROVAL, entry)
            self._reply(peer, {"timeout": seconds}, last=False)

    def _refuse(self, question: Question, reason: str) -> None:
        if question.id in question.talk.questions:
            self._conclude(question, _entry(question.id, "refused", False, None, reason))
            self._reply(question.peer, {"approved": False, "answer": None, "reason": reason})

    def _conclude(self, question: Question, entry: bytes) -> None:
        talk = question.talk
        del talk.questions[question.id]
        question.peer.leave = None
        if question.timer is not None:
            question.timer.cancel()
        talk.spent += len(entry)
        self._runs.add_entry(talk.run, frames.APPROVAL, entry)

    def _answer(self, stream: Stream, request: dict[str, Any]) -> None:
        run = self._active(stream, request)
        if run is None:
            return
        talk = self._talks.get(run.id)
        question = None if talk is None else talk.questions.get(request["approval"])
        if question is None:
            words = "run %s has no open question %s" % (run.id, request["approval"])
            stream.error("approval_gone", words)
            return
        given = request["answer"]
        approved, answer, reason = bool(given["approved"]), given.get("answer"), given.get("reason")
        entry = _entry(question.id, "answered", approved, answer, reason)
        if len(entry) > MAX_ENTRY:
            stream.error("too_large", "an answer has at most %d bytes of JSON" % MAX_ENTRY)
            return
        self._conclude(question, entry)
        self._reply(question.peer, {"approved": approved, "answer": answer, "reason": reason})
        stream.end({})

    # Messages

    def _message(self, stream: Stream, request: dict[str, Any]) -> None:
        run = self._active(stream, request)
        if run is None:
            return
        text = request["text"]
        if not isinstance(text, str):
            raise TypeError("the message is not a text")
        size = len(text.encode("utf-8", "surrogatepass"))
        talk = self._talk(run)
        if len(text) > MAX_MESSAGE:
            stream.error("too_large", "a message has at most %d characters" % MAX_MESSAGE)
            return
        if len(talk.messages) >= MAX_MESSAGES or talk.size + size > MAX_WAITING:
            stream.error("queue_full", "run %s has not read its messages" % run.id)
            return
        talk.messages.append((text, size))
        talk.size += size
        if talk.readers:
            self._hand_out(talk, talk.readers.pop(0))
        stream.end({})

    def _read(self, peer: Peer, request: dict[str, Any]) -> None:
        wait = min(_number(request.get("wait", 0.0)), MAX_WAIT_SECONDS)
        run = peer.run
        if self._refusing is not None or run.reason is not None or run.over:
            self._reply(peer, {"messages": [], "more": False})
            return
        talk = self._talk(run)
        if talk.messages or wait <= 0:
            self._hand_out(talk, peer)
            return

        def leave() -> None:
            if peer in talk.readers:
                talk.readers.remove(peer)

        def no_more() -> None:
            leave()
            self._hand_out(talk, peer)

        talk.readers.append(peer)
        peer.leave = leave
        peer.timer = self._loop.after(wait, no_more)

    def _hand_out(self, talk: Talk, peer: Peer) -> None:
        """What waits, to this peer; back into the queue if the peer does not take it."""
        self._stop_timer(peer)
        count = total = 0
        for _, size in talk.messages:
            if count and total + size > BATCH:
                break
            count, total = count + 1, total + size
        taken = talk.messages[:count]
        del talk.messages[:count]
        talk.size -= total

        def put_back() -> None:
            talk.messages[:0] = taken
            talk.size += total
            if taken and talk.readers:
                self._hand_out(talk, talk.readers.pop(0))

        peer.leave = put_back
        texts = [text for text, _ in taken]
        self._reply(peer, {"messages": texts, "more": bool(talk.messages)})


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)):
        raise TypeError("%r is not a number" % (value,))
    return float(value)


def _words(run: Run) -> str:
    """Why nobody will answer any more."""
    return run.reason if run.reason in ("cancelled", "timeout", "shutdown") else "ended"


def _entry(number: str, state: str, approved: bool, answer: Any, reason: str | None) -> bytes:
    fields = {"id": number, "state": state, "approved": approved, "answer": answer}
    return minijson.dumps(dict(fields, reason=reason))


def _dismiss(socket: _socket.socket, code: str, message: str) -> None:
    try:
        socket.send(minijson.dumps({"error": code, "message": message}) + b"\n")
    except OSError:
        pass  # It did not wait for it.
    socket.close()
