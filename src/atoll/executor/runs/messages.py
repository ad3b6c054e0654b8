"""
Messages that a client sends to a running execution, and that its code reads.

A message is delivered once: one that a reader did not take before it disconnected waits again.
"""

from __future__ import annotations

from ..connection import Stream
from ..event_loop import Loop
from .requests import active_run
from .run import Run
from .runs import Runs
from .user_socket import Peer, UserSocket, number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

MAX_WAIT = 3600.0
"""Seconds that a reader may wait for a message."""
MAX_MESSAGES = 1000
MAX_MESSAGE = 64 * 1024
"""Characters, as the API counts them."""
MAX_WAITING = 8 * 1024 * 1024
"""Bytes of all unread messages of a run."""
MAX_REPLY = 256 * 1024
"""Bytes of messages in one reply."""


class Inbox:
    """The unread messages of one run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.messages: list[tuple[str, int]] = []
        """Text and bytes."""
        self.size = 0
        self.readers: list[Peer] = []


class Messages:
    def __init__(self, loop: Loop, runs: Runs, user_socket: UserSocket) -> None:
        self._loop = loop
        self._runs = runs
        self._user_socket = user_socket
        self._inboxes: dict[str, Inbox] = {}
        self._shutting_down = False
        user_socket.handle("messages", self._read)
        self.operations: dict[str, Callable[[Stream, dict[str, Any]], None]] = {
            "message": self._receive
        }

    def shut_down(self) -> None:
        """End the wait of every reader."""
        self._shutting_down = True
        for inbox in list(self._inboxes.values()):
            self._release_readers(inbox)

    def _of(self, run: Run) -> Inbox:
        found = self._inboxes.get(run.id)
        if found is None:
            found = self._inboxes[run.id] = Inbox(run)
            run.on_end.append(lambda: self._run_ended(run))
        return found

    def _run_ended(self, run: Run) -> None:
        inbox = self._inboxes.pop(run.id, None)
        if inbox is not None:
            self._release_readers(inbox)

    def _release_readers(self, inbox: Inbox) -> None:
        readers, inbox.readers = inbox.readers, []
        for reader in readers:
            self._deliver(inbox, reader)

    def _receive(self, stream: Stream, request: dict[str, Any]) -> None:
        """The request `message` of a control plane."""
        run = active_run(self._runs, request["id"])
        text = request["text"]
        if not isinstance(text, str):
            raise TypeError("the message is not a string")
        size = len(text.encode("utf-8", "surrogatepass"))
        inbox = self._of(run)
        if len(text) > MAX_MESSAGE:
            stream.error("too_large", "a message has at most %d characters" % MAX_MESSAGE)
            return
        if len(inbox.messages) >= MAX_MESSAGES or inbox.size + size > MAX_WAITING:
            stream.error("queue_full", "run %s has not read its messages" % run.id)
            return
        inbox.messages.append((text, size))
        inbox.size += size
        if inbox.readers:
            self._deliver(inbox, inbox.readers.pop(0))
        stream.end({})

    def _read(self, peer: Peer, request: dict[str, Any]) -> None:
        """The request `messages` of user code."""
        wait = min(number(request.get("wait", 0.0)), MAX_WAIT)
        run = peer.run
        if self._shutting_down or not run.accepts_requests:
            self._user_socket.reply(peer, {"messages": [], "more": False})
            return
        inbox = self._of(run)
        if inbox.messages or wait <= 0:
            self._deliver(inbox, peer)
            return

        def leave() -> None:
            if peer in inbox.readers:
                inbox.readers.remove(peer)

        def stop_waiting() -> None:
            leave()
            self._deliver(inbox, peer)

        inbox.readers.append(peer)
        peer.notify_on_leave(leave)
        peer.timer = self._loop.after(wait, stop_waiting)

    def _deliver(self, inbox: Inbox, peer: Peer) -> None:
        """Send waiting messages; they return to the inbox if the peer does not take them."""
        peer.stop_timer()
        count = total = 0
        for _, size in inbox.messages:
            if count and total + size > MAX_REPLY:
                break
            count, total = count + 1, total + size
        taken = inbox.messages[:count]
        del inbox.messages[:count]
        inbox.size -= total

        def put_back() -> None:
            inbox.messages[:0] = taken
            inbox.size += total
            if taken and inbox.readers:
                self._deliver(inbox, inbox.readers.pop(0))

        peer.notify_on_leave(put_back)
        texts = [text for text, _ in taken]
        self._user_socket.reply(peer, {"messages": texts, "more": bool(inbox.messages)})
