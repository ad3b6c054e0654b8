"""
Approvals: questions of user code that wait for a person's answer.

Every question ends: by an answer, its time-out, the end of its run, or the exit of the process that
asked. Questions and answers are entries of the run's log. A run may have few open questions, and
all of them together have a bounded size.
"""

from __future__ import annotations

from ...protocol import frames, minijson
from ...protocol.limits import MAX_APPROVAL_BYTES
from ..connection import Stream
from ..event_loop import Loop, Timer
from .requests import active_run
from .run import Run
from .runs import Runs
from .user_socket import Peer, UserSocket, number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

DEFAULT_TIMEOUT = 300.0
MAX_ENTRY = frames.CHUNK
"""Bytes of one entry in the log, which must fit into what a stream may send at once."""
MAX_QUESTION = MAX_ENTRY - 256
"""The control plane, which has the same bound, adds a little."""
MAX_OPEN = 8
MAX_QUESTIONS = 1000


class Question:
    __slots__ = ("id", "owner", "peer", "timer")

    def __init__(self, question_id: str, peer: Peer, owner: RunQuestions) -> None:
        self.id = question_id
        self.peer = peer
        self.owner = owner
        self.timer: Timer | None = None


class RunQuestions:
    """The questions of one run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.open: dict[str, Question] = {}
        self.asked = 0
        self.size = 0
        """Bytes of all questions and answers."""


class Approvals:
    def __init__(self, loop: Loop, runs: Runs, user_socket: UserSocket) -> None:
        self._loop = loop
        self._runs = runs
        self._user_socket = user_socket
        self._questions: dict[str, RunQuestions] = {}
        self._shutting_down = False
        user_socket.handle("ask", self._ask)
        self.operations: dict[str, Callable[[Stream, dict[str, Any]], None]] = {
            "answer": self._answer
        }

    def shut_down(self) -> None:
        """Refuse all open questions, and those that are still asked."""
        self._shutting_down = True
        for questions in list(self._questions.values()):
            self._refuse_all(questions, "shutdown")

    def _of(self, run: Run) -> RunQuestions:
        found = self._questions.get(run.id)
        if found is None:
            found = self._questions[run.id] = RunQuestions(run)
            run.on_end.append(lambda: self._run_ended(run))
        return found

    def _run_ended(self, run: Run) -> None:
        questions = self._questions.pop(run.id, None)
        if questions is not None:
            self._refuse_all(questions, _end_reason(run))

    def _refuse_all(self, questions: RunQuestions, reason: str) -> None:
        for question in list(questions.open.values()):
            self._refuse(question, reason)

    def _ask(self, peer: Peer, request: dict[str, Any]) -> None:
        run, text, timeout = peer.run, request["question"], request.get("timeout")
        if not isinstance(text, str):
            raise TypeError("the question is not a string")
        seconds = float(run.request.get("approval_timeout", DEFAULT_TIMEOUT))
        if timeout is not None:
            seconds = max(0.0, min(seconds, number(timeout)))
        if self._shutting_down or not run.accepts_requests:
            reason = "shutdown" if self._shutting_down else _end_reason(run)
            self._user_socket.reply(peer, {"approved": False, "answer": None, "reason": reason})
            return
        questions = self._of(run)
        question_id = str(questions.asked + 1)
        entry = minijson.dumps(
            {
                "id": question_id,
                "state": "asked",
                "question": text,
                "data": request.get("data"),
                "timeout": seconds,
            }
        )
        if len(entry) > MAX_QUESTION:
            message = "A question has at most 64 KiB of JSON, data included."
            self._user_socket.error(peer, "too_large", message)
        elif len(questions.open) >= MAX_OPEN:
            message = "This execution has %d open questions; no more are accepted." % MAX_OPEN
            self._user_socket.error(peer, "too_many_questions", message)
        elif questions.asked >= MAX_QUESTIONS or questions.size + len(entry) > MAX_APPROVAL_BYTES:
            message = "This execution has reached its limit of questions."
            self._user_socket.error(peer, "too_many_questions", message)
        else:
            questions.asked += 1
            questions.size += len(entry)
            question = questions.open[question_id] = Question(question_id, peer, questions)
            peer.notify_on_leave(lambda: self._refuse(question, "gone"))
            question.timer = self._loop.after(seconds, lambda: self._refuse(question, "timeout"))
            self._runs.add_entry(run, frames.APPROVAL, entry)
            self._user_socket.reply(peer, {"timeout": seconds}, last=False)

    def _refuse(self, question: Question, reason: str) -> None:
        if question.id in question.owner.open:
            self._close(question, _entry(question.id, "refused", False, None, reason))
            refusal = {"approved": False, "answer": None, "reason": reason}
            self._user_socket.reply(question.peer, refusal)

    def _close(self, question: Question, entry: bytes) -> None:
        questions = question.owner
        del questions.open[question.id]
        question.peer.forget_callback()
        if question.timer is not None:
            question.timer.cancel()
        questions.size += len(entry)
        self._runs.add_entry(questions.run, frames.APPROVAL, entry)

    def _answer(self, stream: Stream, request: dict[str, Any]) -> None:
        """The request `answer` of a control plane."""
        run = active_run(self._runs, request["id"])
        questions = self._questions.get(run.id)
        question = None if questions is None else questions.open.get(request["approval"])
        if question is None:
            message = "run %s has no open question %s" % (run.id, request["approval"])
            stream.error("approval_gone", message)
            return
        given = request["answer"]
        approved, answer, reason = bool(given["approved"]), given.get("answer"), given.get("reason")
        entry = _entry(question.id, "answered", approved, answer, reason)
        if len(entry) > MAX_ENTRY:
            stream.error("too_large", "an answer has at most %d bytes of JSON" % MAX_ENTRY)
            return
        self._close(question, entry)
        reply = {"approved": approved, "answer": answer, "reason": reason}
        self._user_socket.reply(question.peer, reply)
        stream.end({})


def _end_reason(run: Run) -> str:
    """Why a question of an ending run gets no answer."""
    return run.reason if run.reason in ("cancelled", "timeout", "shutdown") else "ended"


def _entry(question_id: str, state: str, approved: bool, answer: Any, reason: str | None) -> bytes:
    fields = {"id": question_id, "state": state, "approved": approved, "answer": answer}
    return minijson.dumps(dict(fields, reason=reason))
