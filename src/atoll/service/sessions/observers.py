"""Notifies parts of this replica of what happens to sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.model.session import Session
    from atoll.service.sessions.connections import Connection


class SessionObserver:
    """
    Receives what happens to sessions on this replica. Subclasses override what they need. The calls
    are synchronous and must neither block nor raise.
    """

    def session_changed(self, session: Session) -> None:
        """This replica wrote or read a record whose timers may differ from the ones before."""

    def session_used(self, session: Session) -> None:
        """A request needs the session."""

    def session_connected(self, connection: Connection) -> None:
        """A link to the session's instance is open; its journal may hold earlier results."""

    def session_stopping(self, session: Session) -> None:
        """The instance is about to be stopped, and everything that runs in it."""

    def session_ended(self, session: Session) -> None:
        """The session's end is recorded; its instance still exists."""

    def session_cleared(self, session_id: str) -> None:
        """This process has removed what an ended session had, or has failed to."""

    def settling_delayed(self, session_id: str, seconds: float) -> None:
        """A step towards the wanted state failed and is to be repeated after `seconds`."""


class SessionObservers(SessionObserver):
    """Passes each notification on to all subscribers, in the order in which they subscribed."""

    def __init__(self) -> None:
        self._observers: list[SessionObserver] = []

    def subscribe(self, observer: SessionObserver) -> None:
        self._observers.append(observer)

    def session_changed(self, session: Session) -> None:
        for observer in self._observers:
            observer.session_changed(session)

    def session_used(self, session: Session) -> None:
        for observer in self._observers:
            observer.session_used(session)

    def session_connected(self, connection: Connection) -> None:
        for observer in self._observers:
            observer.session_connected(connection)

    def session_stopping(self, session: Session) -> None:
        for observer in self._observers:
            observer.session_stopping(session)

    def session_ended(self, session: Session) -> None:
        for observer in self._observers:
            observer.session_ended(session)

    def session_cleared(self, session_id: str) -> None:
        for observer in self._observers:
            observer.session_cleared(session_id)

    def settling_delayed(self, session_id: str, seconds: float) -> None:
        for observer in self._observers:
            observer.settling_delayed(session_id, seconds)
