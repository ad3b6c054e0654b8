"""
The storage contract.

Every method is one small transaction. When it returns, what it wrote is durable: the process may be
killed immediately afterwards.

Concurrent writes are settled by compare-and-set on `version`. The caller passes the entity as it
was read, with changes. If the stored version is still that of the entity, the store writes the
entity with version + 1; otherwise it writes nothing and raises `VersionConflict`.

- Entities come back equal to what was stored.
- Adding an id that exists raises `AlreadyExists`. Reading an id that does not exist returns None.
- Removing an id that does not exist does nothing.
- If the back-end cannot be reached, every method raises `DatabaseUnavailable`.
- With `event`, the event is stored in the same transaction as the change, or not at all.

Methods named `page` list entities newest first. A page has at most `limit` items and a few
megabytes. Its cursor stays valid while rows are added and removed: following pages never repeat or
skip an item that existed all the time. A cursor that the store did not make raises `InvalidRequest`
with code `bad_cursor`. A page costs the same however deep it is.

Methods with `after` and `limit` list entities by id: the first `limit` whose id is greater than
`after`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from atoll.model.api_key import ApiKey
    from atoll.model.checkpoint import Checkpoint
    from atoll.model.event import Event, FeedPage, FeedRange
    from atoll.model.execution import Execution, ExecutionStatus
    from atoll.model.idempotency_record import IdempotencyRecord
    from atoll.model.instance import Instance
    from atoll.model.node import Drain, Node, NodeHealth
    from atoll.model.page import Page
    from atoll.model.session import Holding, Session, SessionStatus
    from atoll.model.template import Template
    from atoll.model.volume import Volume
    from atoll.model.webhook import Webhook


class Sessions(Protocol):
    async def add(self, session: Session, *, event: Event | None = None) -> None:
        """
        Add a session. If it has an `instance_id`, the same transaction makes it the owner of that
        instance; raises `InstanceTaken` if the instance does not exist or has another owner.
        """

    async def get(self, session_id: str) -> Session | None: ...

    async def save(self, session: Session, *, event: Event | None = None) -> Session:
        """
        Compare-and-set; returns the session with its new version. A new `instance_id` is treated as
        in `add`, unless the session has ended.
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
        """Sessions of a node whose `plan.unsettled_at` is not after `now`, oldest first."""

    async def timed_out(self, now: datetime, *, node_id: str, limit: int) -> list[Session]:
        """Sessions of a node whose `plan.timer_at` is not after `now`, oldest first."""

    async def touch(self, session: Session, at: datetime) -> bool:
        """
        Set `active_at` and leave everything else, also the version, unchanged. Returns False and
        writes nothing if the stored version is not that of `session`.
        """

    async def explain(self, session: Session, message: str) -> bool:
        """
        Set `message` and leave everything else, also the version, unchanged. Returns False and
        writes nothing if the stored version is not that of `session`.
        """

    async def unfinished(
        self, *, limit: int, after: str = "", node_id: str | None = None
    ) -> list[Session]:
        """Sessions that have not ended, of one node or of all."""

    async def holdings(self, node_id: str, *, limit: int, after: str = "") -> list[Holding]:
        """
        The instances and workspaces that sessions have on a node. Sessions that have ended are
        listed as long as something of theirs remains there.
        """

    async def count(self, status: SessionStatus, *, node_id: str | None = None) -> int: ...


class Executions(Protocol):
    async def add(self, execution: Execution, *, event: Event | None = None) -> None:
        """
        Add an execution. Raises `AlreadyExists` also if its invocation has an execution with the
        same `ordinal`: of several that race to be the first of an invocation, one succeeds.
        """

    async def add_after(
        self, execution: Execution, previous: Execution, *, event: Event | None = None
    ) -> None:
        """
        Add the next execution of an invocation and, in the same transaction, mark `previous` as
        superseded by compare-and-set.
        """

    async def get(self, execution_id: str) -> Execution | None: ...

    async def save(self, execution: Execution, *, event: Event | None = None) -> Execution:
        """
        Compare-and-set; returns the execution with its new version. The request, the session, the
        creation time and the place in the invocation never change and are not written.
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
        """With `invocation_id`, ordered by ordinal, the last one first."""

    async def latest(
        self,
        *,
        session_id: str | None = None,
        statuses: Sequence[ExecutionStatus] = (),
        cursor: str | None = None,
        limit: int = 50,
    ) -> Page[Execution]:
        """
        Executions that are the latest of their invocations, with one of `statuses` if any are
        given. The others are filtered out of each page, so that a page may have fewer than `limit`
        items, or none, without being the last.
        """

    async def unfinished(
        self, *, limit: int, after: str = "", holder: str | None = None
    ) -> list[Execution]:
        """Executions that have not ended, of one holder or of all."""

    async def holders(self) -> set[str | None]:
        """The holders of executions that have not ended."""


class Instances(Protocol):
    async def add(self, instance: Instance) -> None: ...

    async def get(self, instance_id: str) -> Instance | None: ...

    async def all(self) -> list[Instance]: ...

    async def count_unclaimed(self, node_id: str, *, except_holder: str) -> dict[str, int]:
        """
        The number of instances of a node without a session, by template, leaving out those in the
        warm pool of `except_holder`.
        """

    async def claim(self, instance_id: str, *, holder: str, previous_holder: str | None) -> bool:
        """
        Move an instance without a session to the pool of `holder`. Returns False and changes
        nothing if it is gone, has a session, or is not in the pool of `previous_holder`.
        """

    async def remove_unclaimed(self, instance_id: str) -> bool:
        """Remove an instance without a session; returns False if it has one."""

    async def remove(self, instance_id: str) -> None: ...


class Templates(Protocol):
    """A template is its newest version. Previous versions are kept until they are dropped."""

    async def add(self, template: Template, *, event: Event | None = None) -> None: ...

    async def get(self, template_id: str) -> Template | None:
        """The newest version."""

    async def save(self, template: Template, *, event: Event | None = None) -> Template:
        """Compare-and-set of the newest version, whose number stays the same."""

    async def supersede(
        self, before: Template, template: Template, *, event: Event | None = None
    ) -> Template:
        """
        Add a version with the next number, by compare-and-set on `before`, which becomes a
        previous version as it is passed here.
        """

    async def numbered(self, template_id: str, number: int) -> Template | None: ...

    async def ready(self, template_id: str) -> Template | None:
        """The newest version with status `ready`."""

    async def before(
        self, template_id: str, *, number: int | None = None, limit: int = 50
    ) -> list[Template]:
        """Previous versions, newest first; with `number`, those with smaller numbers."""

    async def drop(self, template_id: str, number: int) -> None:
        """Remove a previous version."""

    async def unbuilt(self, *, limit: int, after: str = "") -> list[Template]:
        """Templates whose status is `pending` or `building`."""

    async def remove(self, template_id: str, *, event: Event | None = None) -> bool:
        """Remove all versions; returns whether there were any."""

    async def page(self, *, cursor: str | None = None, limit: int = 50) -> Page[Template]: ...


class ApiKeys(Protocol):
    async def add(self, key: ApiKey) -> None:
        """Does nothing if there is a key with the same digest."""

    async def all(self) -> list[ApiKey]: ...

    async def remove(self, key_id: str) -> bool:
        """Returns whether the key existed."""


class IdempotencyRecords(Protocol):
    """Requests with an `Idempotency-Key`, and their answers."""

    async def claim(self, record: IdempotencyRecord) -> IdempotencyRecord | None:
        """
        Add a record and return None; if one with this id exists and has not expired at the new
        one's `created_at`, return that one instead.
        """

    async def take_over(self, record: IdempotencyRecord, holder: str) -> bool:
        """
        Make `holder` the holder of an unanswered request and set its fingerprint. Returns False if
        the request was answered or has another holder by now.
        """

    async def answer(self, record: IdempotencyRecord) -> bool:
        """
        Record fingerprint and answer. Returns False and writes nothing if the request was answered
        already or has another holder.
        """

    async def forget(self, record_id: str, holder: str) -> None:
        """Remove a request that `holder` did not answer, so that it can be made again."""

    async def expire(self, now: datetime, *, limit: int) -> list[IdempotencyRecord]:
        """Remove some expired requests and return them without headers and bodies."""


class Checkpoints(Protocol):
    async def add(self, checkpoint: Checkpoint) -> None: ...

    async def get(self, session_id: str) -> Checkpoint | None: ...

    async def save(self, checkpoint: Checkpoint) -> Checkpoint:
        """Compare-and-set; returns the checkpoint with its new version."""

    async def expired(self, now: datetime, *, limit: int) -> list[Checkpoint]:
        """Checkpoints whose `kept_until` is not after `now`, oldest first."""

    async def remove(self, session_id: str) -> None: ...


class Volumes(Protocol):
    async def add(self, volume: Volume) -> None: ...

    async def get(self, volume_id: str) -> Volume | None: ...

    async def remove(self, volume_id: str) -> bool:
        """Returns whether the volume existed."""

    async def page(self, *, cursor: str | None = None, limit: int = 50) -> Page[Volume]: ...


class Nodes(Protocol):
    """
    A node is written from two sides: it reports on itself, and others judge it (health, cordon,
    drain). Neither side overwrites fields of the other.
    """

    async def report(self, node: Node, *, event: Event | None = None) -> None:
        """
        Store what a node reports on itself and add the node if it is new. The fields that others
        write are taken from `node` for a new one and stay unchanged otherwise.
        """

    async def get(self, node_id: str) -> Node | None: ...

    async def all(self) -> list[Node]:
        """Ordered by id."""

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
        Record the result of a probe. Returns False and writes nothing if status and failures are no
        longer those of `node`.
        """

    async def cordon(self, node_id: str, cordoned: bool, *, event: Event | None = None) -> bool:
        """Returns whether the node exists."""

    async def drain(self, node_id: str, drain: Drain | None, *, event: Event | None = None) -> bool:
        """Start to drain a node, or stop with None; returns whether the node exists."""

    async def update_drain(self, node_id: str, drain: Drain, *, event: Event | None = None) -> bool:
        """Record the progress of a drain; returns False if the node is not being drained."""

    async def remove(self, node_id: str, *, event: Event | None = None) -> bool:
        """Returns whether the node existed."""


class Events(Protocol):
    """
    The feed: all events that were stored with changes, in one order.

    An event is on the feed once it has a number. Numbers increase by one without gaps, and no event
    ever appears at or below a number that was visible.
    """

    async def number(self, *, limit: int = 1000) -> int:
        """
        Number up to `limit` events that have no number, and return how many there were. Replicas
        may do this at the same time.
        """

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
        Events with greater numbers, in order, whose type matches one of `types` (`session.stopped`,
        `session.*`). May search only a part of the feed; the result says how far it got.
        """

    async def expire(self, before: datetime, *, limit: int) -> int:
        """
        Remove up to `limit` events from the start of the feed, until the first that is not older
        than `before`; returns how many.
        """


class Webhooks(Protocol):
    async def add(self, webhook: Webhook) -> None: ...

    async def get(self, webhook_id: str) -> Webhook | None: ...

    async def save(self, webhook: Webhook) -> Webhook:
        """Compare-and-set; returns the webhook with its new version."""

    async def all(self) -> list[Webhook]:
        """Oldest first; there are few."""

    async def remove(self, webhook_id: str) -> bool:
        """Returns whether the webhook existed."""


class Store(Protocol):
    sessions: Sessions
    executions: Executions
    instances: Instances
    templates: Templates
    api_keys: ApiKeys
    idempotency_records: IdempotencyRecords
    checkpoints: Checkpoints
    volumes: Volumes
    nodes: Nodes
    events: Events
    webhooks: Webhooks

    async def cluster(self) -> str:
        """The id of this database, created by the first call; the same for all replicas."""

    async def secret(self) -> str:
        """256 random bits, created by the first call; the same for all replicas."""

    async def open(self) -> None:
        """Connect, and upgrade the schema where the back-end permits it."""

    async def close(self) -> None: ...

    async def ping(self) -> None:
        """Raises `DatabaseUnavailable` if the back-end does not answer."""
