"""
The storage contract.

Every method is its own small transaction and is durable when it returns: the process may be killed
right after. Writes that race are settled by compare-and-set on `version`: the entity given is the
one that was read, changed; it is written as version + 1 if the stored version is still the one
given, and `Conflict` is raised (nothing written) otherwise. Entities come back equal to what was
put in.

Lists are newest first, at most `limit` items and no more than some megabytes a page, and paged by a
cursor that stays valid while rows are added and removed: a page never repeats or skips an item that
was there all along. A cursor that this store did not make raises `InvalidRequest` with code
`bad_cursor`. A page costs the same however deep it is.

Adding an id that exists raises `Conflict`. Reading what is not there gives None. A back-end that
cannot be reached raises `TemporaryError` with code `database_unavailable`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from atoll.model.checkpoint import Checkpoint
    from atoll.model.event import Event, FeedPage, FeedRange
    from atoll.model.execution import Execution, ExecutionStatus
    from atoll.model.instance import Instance
    from atoll.model.key import Key
    from atoll.model.keyed_request import KeyedRequest
    from atoll.model.node import Drain, Node, NodeHealth
    from atoll.model.page import Page
    from atoll.model.session import Holding, Session, SessionStatus
    from atoll.model.template import Template
    from atoll.model.volume import Volume
    from atoll.model.webhook import Webhook


class Sessions(Protocol):
    async def add(self, session: Session, *, event: Event | None = None) -> None:
        """
        Store a new session, and the event if one is given; in the same transaction its
        `instance_id`, when set, is recorded as that instance's owner (`Conflict` when the instance
        is not stored or has another owner).
        """

    async def get(self, session_id: str) -> Session | None: ...

    async def save(self, session: Session, *, event: Event | None = None) -> Session:
        """
        Compare-and-set, with the event if one is given; returns the session with its new version.
        Unless the session has ended, `instance_id` is carried over to the instances as in `add`.
        """

    async def page(
        self,
        *,
        status: SessionStatus | None = None,
        template_id: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> Page[Session]: ...

    async def unsettled(self, now: datetime, *, node_id: str, limit: int) -> list[Session]:
        """Those of a node whose `plan.unsettled_at` is not after `now`, oldest first."""

    async def timed_out(self, now: datetime, *, node_id: str, limit: int) -> list[Session]:
        """Those of a node whose `plan.timer_at` is not after `now`, oldest first."""

    async def touch(self, session: Session, at: datetime) -> bool:
        """
        Write its `active_at` and nothing else, its version included; False, and nothing written,
        when it is no longer at the version given.
        """

    async def unfinished(
        self, *, limit: int, after: str = "", node_id: str | None = None
    ) -> list[Session]:
        """Sessions that have not ended, of one node or all, in order of id, beyond `after`."""

    async def holdings(self, node_id: str, *, limit: int, after: str = "") -> list[Holding]:
        """
        What sessions of a node have there, in order of id, beyond `after`; of those that have ended
        the ones alone that are not cleared yet.
        """

    async def count(self, status: SessionStatus, *, node_id: str | None = None) -> int: ...


class Executions(Protocol):
    async def add(self, execution: Execution, *, event: Event | None = None) -> None:
        """
        Store it, and the event if one is given, as do the others here. An invocation has one
        execution of each `ordinal`: another is a `Conflict` as well, so of those that race to be
        its first one is.
        """

    async def add_after(
        self, execution: Execution, previous: Execution, *, event: Event | None = None
    ) -> None:
        """
        Store the next execution of an invocation and, in the same transaction, that `previous` is
        superseded: a compare-and-set of that one.
        """

    async def get(self, execution_id: str) -> Execution | None: ...

    async def save(self, execution: Execution, *, event: Event | None = None) -> Execution:
        """
        Compare-and-set of status, instance, holder, times, retry count, attempts, outcome and what
        is kept elsewhere; the request never changes, nor does its place in its invocation.
        """

    async def page(
        self,
        *,
        session_id: str | None = None,
        invocation_id: str | None = None,
        status: ExecutionStatus | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> Page[Execution]:
        """Those of one invocation in the order of their ordinals, the last one first."""

    async def latest(
        self,
        *,
        session_id: str | None = None,
        statuses: Sequence[ExecutionStatus] = (),
        cursor: str | None = None,
        limit: int = 50,
    ) -> Page[Execution]:
        """
        Executions that are the latest of their invocations, of any of these statuses if some are
        given. The others are left out of what a page would hold, so it may hold fewer than `limit`,
        or none, and not be the last.
        """

    async def unfinished(
        self, *, limit: int, after: str = "", holder: str | None = None
    ) -> list[Execution]:
        """
        Executions that have not ended, in order of id, beyond the id `after`; with `holder`, those
        that it holds.
        """

    async def holders(self) -> set[str | None]:
        """Who holds executions that have not ended."""


class Instances(Protocol):
    async def add(self, instance: Instance) -> None: ...

    async def get(self, instance_id: str) -> Instance | None: ...

    async def all(self) -> list[Instance]: ...

    async def count_unclaimed(self, node_id: str, *, except_holder: str) -> dict[str, int]:
        """How many of a node wait for a session, by template, without those of that holder."""

    async def claim(self, instance_id: str, *, holder: str, previous_holder: str | None) -> bool:
        """
        Make an instance that waits for a session `holder`'s; False, and nothing changed, when it is
        gone, has a session, or is not `instead_of`'s any more.
        """

    async def remove_unclaimed(self, instance_id: str) -> bool:
        """Forget one that no session has; False, and nothing changed, when one has it."""

    async def remove(self, instance_id: str) -> None:
        """Forget it; nothing happens when it is not there."""


class Templates(Protocol):
    """
    A template is its newest version; those before are kept until they are dropped. An event that is
    given is stored in the same transaction.
    """

    async def add(self, template: Template, *, event: Event | None = None) -> None: ...

    async def get(self, template_id: str) -> Template | None:
        """The newest version."""

    async def save(self, template: Template, *, event: Event | None = None) -> Template:
        """Compare-and-set of the newest version, which keeps its number."""

    async def supersede(
        self, before: Template, template: Template, *, event: Event | None = None
    ) -> Template:
        """
        A new version, numbered one higher: compare-and-set by `before`, which is kept as it is
        given here.
        """

    async def numbered(self, template_id: str, number: int) -> Template | None: ...

    async def ready(self, template_id: str) -> Template | None:
        """The newest version whose status is `ready`."""

    async def before(
        self, template_id: str, *, number: int | None = None, limit: int = 50
    ) -> list[Template]:
        """Versions that are not the newest, below `number` if one is given, newest first."""

    async def drop(self, template_id: str, number: int) -> None:
        """Forget a version that is not the newest; nothing happens when it is not there."""

    async def unbuilt(self, *, limit: int, after: str = "") -> list[Template]:
        """Those `pending` or `building`, in order of id, beyond the id `after`."""

    async def remove(self, template_id: str, *, event: Event | None = None) -> bool:
        """With all its versions; whether it was there. The event only if it was."""

    async def page(self, *, cursor: str | None = None, limit: int = 50) -> Page[Template]: ...


class Keys(Protocol):
    async def add(self, key: Key) -> None:
        """Nothing happens when a key with this digest is there."""

    async def all(self) -> list[Key]: ...

    async def remove(self, key_id: str) -> bool: ...


class KeyedRequests(Protocol):
    async def claim(self, request: KeyedRequest) -> KeyedRequest | None:
        """
        Store it if its id is new or what is there has expired by its `created_at`; then None,
        otherwise the one that is there.
        """

    async def take_over(self, request: KeyedRequest, holder: str) -> bool:
        """
        Make one that was not answered `holder`'s, with the fingerprint that is given; False when it
        has moved on meanwhile.
        """

    async def answer(self, request: KeyedRequest) -> bool:
        """
        Record fingerprint and answer; False, and nothing written, when its holder is another or it
        is answered.
        """

    async def forget(self, request_id: str, holder: str) -> None:
        """Remove one that `holder` did not answer, so that it can be asked again."""

    async def expire(self, now: datetime, *, limit: int) -> list[KeyedRequest]:
        """Remove some that have expired; what was removed, without bodies."""


class Checkpoints(Protocol):
    async def add(self, checkpoint: Checkpoint) -> None: ...

    async def get(self, session_id: str) -> Checkpoint | None: ...

    async def save(self, checkpoint: Checkpoint) -> Checkpoint:
        """Compare-and-set; returns the checkpoint with its new version."""

    async def expired(self, now: datetime, *, limit: int) -> list[Checkpoint]:
        """Those whose `kept_until` is not after `now`, oldest first."""

    async def remove(self, session_id: str) -> None:
        """Forget it; nothing happens when it is not there."""


class Volumes(Protocol):
    async def add(self, volume: Volume) -> None: ...

    async def get(self, volume_id: str) -> Volume | None: ...

    async def remove(self, volume_id: str) -> bool:
        """Whether it was there."""

    async def page(self, *, cursor: str | None = None, limit: int = 50) -> Page[Volume]: ...


class Nodes(Protocol):
    """What nodes tell of themselves, and what others say of them; each is written by itself."""

    async def report(self, node: Node, *, event: Event | None = None) -> None:
        """
        Store what a node tells of itself, whether it is new or not. What others say of it stays as
        it is; that of a new one is as given.
        """

    async def get(self, node_id: str) -> Node | None: ...

    async def all(self) -> list[Node]:
        """In order of id."""

    async def record_probe(
        self,
        node: Node,
        *,
        status: NodeHealth,
        failures: int,
        problem: str | None,
        event: Event | None = None,
    ) -> bool:
        """
        Write what a probe found; False, and nothing written, when status and failures are no longer
        those of `node`.
        """

    async def cordon(self, node_id: str, cordoned: bool, *, event: Event | None = None) -> bool:
        """Whether it is there."""

    async def drain(self, node_id: str, drain: Drain | None, *, event: Event | None = None) -> bool:
        """Begin to empty it, or end that with None; whether it is there."""

    async def update_drain(self, node_id: str, drain: Drain, *, event: Event | None = None) -> bool:
        """Write how far that is; False, and nothing written, when it is not being emptied."""

    async def remove(self, node_id: str, *, event: Event | None = None) -> bool:
        """Forget a node; whether it was there."""


class Events(Protocol):
    """
    The feed: what was stored as `event` with other things, in one order for all.

    An event has no place on the feed until it is numbered. Numbers grow by one without gaps, and
    whoever has read up to a number has read all that will ever be up to it.
    """

    async def number(self, *, limit: int = 1000) -> int:
        """Give numbers to at most so many that have none; how many. Any replica may, at once."""

    async def range(self) -> FeedRange: ...

    async def after(
        self,
        number: int,
        *,
        types: Sequence[str] = (),
        subject: str | None = None,
        limit: int = 100,
    ) -> FeedPage:
        """
        Events beyond a number, in order, whose type one of `types` (`session.*` too) matches. It
        may look through a part of the feed only, and says how far it got.
        """

    async def expire(self, before: datetime, *, limit: int) -> int:
        """
        Forget at most so many of the lowest numbers, up to the first that is not from before; how
        many.
        """


class Webhooks(Protocol):
    async def add(self, webhook: Webhook) -> None: ...

    async def get(self, webhook_id: str) -> Webhook | None: ...

    async def save(self, webhook: Webhook) -> Webhook:
        """Compare-and-set; returns the webhook with its new version."""

    async def all(self) -> list[Webhook]:
        """Oldest first. They are few."""

    async def remove(self, webhook_id: str) -> bool:
        """Whether it was there."""


class Store(Protocol):
    sessions: Sessions
    executions: Executions
    instances: Instances
    templates: Templates
    keys: Keys
    requests: KeyedRequests
    checkpoints: Checkpoints
    volumes: Volumes
    nodes: Nodes
    events: Events
    webhooks: Webhooks

    async def cluster(self) -> str:
        """An id of this database, made when it is first asked for and the same for all."""

    async def secret(self) -> str:
        """256 random bits that the replicas of this database share, made in the same way."""

    async def open(self) -> None:
        """Bring the schema up where the back-end may, and connect."""

    async def close(self) -> None: ...

    async def ping(self) -> None:
        """Raise `TemporaryError` when the back-end does not answer."""
