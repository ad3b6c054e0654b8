"""
Every setting, its default and its unit.

Read once, in `app`, and handed down. A setting comes from its argument, else from the
environment variable `ATOLL_<NAME>` (in a group: `ATOLL_<GROUP>__<NAME>`), else from the default
here. A variable that begins with `ATOLL_` and names no setting is an error, so that a misspelt one
is not ignored. A value that no operator would change is a constant in the module that uses it.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from atoll.errors import InvalidRequest

MiB = 1024 * 1024
GiB = 1024 * MiB

# Read by the client side, not settings of the server.
CLIENT_VARIABLES = frozenset({"ATOLL_URL"})


_BUCKET_URL = re.compile(
    r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/(?!\.{1,2}(/|$))[A-Za-z0-9._-]+)*/?"
)


def default_data_dir() -> Path:
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "atoll"


def _seconds(value: Any) -> Any:
    """Environment variables are text; a number means seconds."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def _split_at(separator: str) -> BeforeValidator:
    def split(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return [item.strip() for item in value.split(separator) if item.strip()]

    return BeforeValidator(split)


T = TypeVar("T")

Seconds = Annotated[timedelta, BeforeValidator(_seconds)]
CommaSeparated = Annotated[tuple[T, ...], NoDecode, _split_at(",")]
ColonSeparated = Annotated[tuple[T, ...], NoDecode, _split_at(":")]


KEY_BYTES = 32


def parse_key(text: str) -> bytes:
    """A key of 32 bytes, in base64 (either alphabet) or hexadecimal; raises `ValueError`."""
    text = text.strip()
    if len(text) == 2 * KEY_BYTES:
        with contextlib.suppress(ValueError):
            return bytes.fromhex(text)
    try:
        padded = text + "=" * (-len(text) % 4)
        key = base64.b64decode(padded.replace("-", "+").replace("_", "/"), validate=True)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(f"must be {KEY_BYTES} bytes in base64 or hexadecimal")
    return key


class Group(BaseModel):
    # Built with `Settings`, once.
    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, defer_build=True
    )


class ConnectionSettings(Group):
    """Connections of clients, and the limits of one process for them."""

    max_connections: int = Field(4096, ge=1)
    """
    Open connections; never more than half of the process's file descriptors. Health checks are
    served beyond this limit.
    """
    keep_alive: Seconds = Field(timedelta(seconds=75), gt=timedelta(0))
    """Idle time between two requests on one connection, in seconds."""
    max_streams: int = Field(1000, ge=1)
    """Open event streams and consoles; one API key may use half of them."""
    answer_memory: int = Field(256 * MiB, ge=1 * MiB)
    """
    Memory for answers that clients have not read yet, in bytes; one API key may use half of it.
    """


class SessionSettings(Group):
    timeout: Seconds = Field(timedelta(seconds=300), gt=timedelta(0))
    """Default lifetime of a session, in seconds."""
    max_timeout: Seconds = Field(timedelta(days=1), gt=timedelta(0))
    """Longest lifetime that a session may request, in seconds."""
    cpu: float = Field(1.0, gt=0)
    """CPU cores of a session if neither it nor its template sets them."""
    memory: int = Field(512 * MiB, ge=16 * MiB)
    """Memory of such a session, in bytes."""
    disk: int = Field(1 * GiB, ge=1 * MiB)
    """Workspace size of such a session, in bytes."""
    max_processes: int = Field(128, ge=4)
    """Processes and threads of such a session."""
    max_cpu: float = Field(64.0, gt=0)
    """CPU cores that a session may request at most."""
    max_memory: int = Field(64 * GiB, ge=16 * MiB)
    """Memory that a session may request at most, in bytes."""
    max_disk: int = Field(256 * GiB, ge=1 * MiB)
    """Workspace size that a session may request at most, in bytes."""
    idle_timeout: Seconds | None = Field(None, gt=timedelta(0))
    """Default time without requests until a session is stopped, in seconds; never if not set."""
    archive_after: Seconds | None = Field(None, gt=timedelta(0))
    """Default time after which a stopped session is archived, in seconds; never if not set."""
    delete_after: Seconds | None = Field(None, gt=timedelta(0))
    """Default time after which a stopped session is deleted, in seconds; never if not set."""
    sweep: Seconds = Field(timedelta(seconds=10), gt=timedelta(0))
    """
    Time between two sweeps for sessions that are not in their wanted state, and for orphaned
    instances, in seconds.
    """
    sweep_batch: int = Field(100, ge=1)
    """Sessions handled in one such sweep."""
    timer_sweep: Seconds = Field(timedelta(seconds=60), gt=timedelta(0))
    """Time between two sweeps for sessions that are idle or expired, in seconds."""
    timer_batch: int = Field(10, ge=1)
    """Sessions that such a sweep handles at the same time."""
    stop_grace: Seconds = Field(timedelta(seconds=10), ge=timedelta(0))
    """Time for the processes of a session to end when it is stopped, in seconds."""
    retries: int = Field(5, ge=0)
    """Retries of a failed state change before the session is in `error`."""


class ArchiveSettings(Group):
    """Archived sessions: their files are in the blob store only."""

    concurrency: int = Field(3, ge=1)
    """Sessions that one node archives at the same time."""
    retries: int = Field(3, ge=0)
    """Retries of a failed archive before the session is in `error`."""
    timeout: Seconds = Field(timedelta(minutes=120), gt=timedelta(0))
    """Time to archive one session, in seconds."""


class NodeSettings(Group):
    """This node, and how it checks the other nodes."""

    url: str | None = Field(None, pattern=r"^https?://[^/?#@]+$")
    """
    Address at which other nodes reach this one; the address it listens on if not set.
    """
    labels: dict[str, str] = {}
    """Labels that sessions can require of a node: a JSON object of names and values."""
    max_sessions: int | None = Field(None, ge=1)
    """Running sessions that the node accepts; as many as fit in its memory if not set."""
    spread_above: int = Field(35, ge=0)
    """Running sessions on a node above which other nodes are preferred."""
    probe: Seconds = Field(timedelta(seconds=10), gt=timedelta(0))
    """Time between two probes of a node, and between two reports of this node, in seconds."""
    probe_timeout: Seconds = Field(timedelta(seconds=5), gt=timedelta(0))
    """Time for a node to answer a probe, in seconds."""
    ca_file: Path | None = None
    """Certificate authorities for nodes with https addresses, PEM; the system's if not set."""
    unhealthy_after: int = Field(3, ge=1)
    """Failed probes in a row after which a node gets no work and its sessions move away."""
    drain_grace: Seconds = Field(timedelta(seconds=300), ge=timedelta(0))
    """
    Time that a draining node gives running executions to end, in seconds; those that still run are
    stopped and retried on the next node.
    """


class EventSettings(Group):
    """The event feed and webhooks."""

    keep: Seconds = Field(timedelta(hours=24), ge=timedelta(0))
    """How long events are kept, in seconds."""
    webhook_retries: int = Field(8, ge=0)
    """Retries of one delivery, after pauses that double up to five minutes."""
    webhook_private: bool = False
    """Allow webhooks at private and loopback addresses."""


class ExecutionSettings(Group):
    timeout: Seconds = Field(timedelta(seconds=30), gt=timedelta(0))
    """Default time-out of an execution, in seconds."""
    max_timeout: Seconds = Field(timedelta(seconds=1800), gt=timedelta(0))
    """Longest time-out that an execution may request, in seconds."""
    output_limit: int = Field(1 * MiB, ge=1024, le=128 * MiB)
    """Bytes kept of stdout, and of stderr; the rest is counted and discarded."""
    return_limit: int = Field(1 * MiB, ge=1024, le=128 * MiB)
    """Largest return value, in bytes of JSON."""
    max_wait: Seconds = Field(timedelta(seconds=300), gt=timedelta(0))
    """Longest `wait` of one request, in seconds."""
    queue_limit: int = Field(100, ge=1)
    """Executions that may be queued for one session; one more is refused."""
    retries: int = Field(3, ge=0)
    """Retries of an execution whose instance was lost through no fault of its code."""
    retry_backoff: Seconds = Field(timedelta(seconds=1), ge=timedelta(0))
    """Pause before the first retry, in seconds; it doubles each time."""
    retry_max_backoff: Seconds = Field(timedelta(seconds=10), ge=timedelta(0))
    """Longest pause between two retries, in seconds."""
    cancel_grace: Seconds = Field(timedelta(seconds=2), ge=timedelta(0))
    """Time between SIGTERM and SIGKILL of an execution that is cancelled, in seconds."""
    approval_timeout: Seconds = Field(timedelta(seconds=300), gt=timedelta(0))
    """How long an execution waits for the answer to an approval, in seconds."""


class LinkSettings(Group):
    connect_timeout: Seconds = Field(timedelta(seconds=5), gt=timedelta(0))
    """Time for a running instance to accept a new connection, in seconds."""
    start_timeout: Seconds = Field(timedelta(seconds=30), gt=timedelta(0))
    """Time for a new instance to become ready, in seconds."""
    read_timeout: Seconds = Field(timedelta(seconds=30), gt=timedelta(0))
    """Time for an executor to answer a short request, such as a file operation, in seconds."""
    heartbeat: Seconds = Field(timedelta(seconds=5), gt=timedelta(0))
    """Time between two heartbeats of an executor that runs code, in seconds."""
    lost_after: Seconds = Field(timedelta(seconds=15), gt=timedelta(0))
    """Time without a heartbeat after which the instance is checked, in seconds."""
    unattended_grace: Seconds = Field(timedelta(minutes=10), gt=timedelta(0))
    """
    Time that an instance without a connected server outlives its session, in seconds; also for
    ready instances of the pool, which have no session.
    """
    unattended_limit: Seconds = Field(timedelta(hours=6), gt=timedelta(0))
    """Longest time that an instance runs without a connected server, in seconds."""
    callback_url: str | None = Field(None, pattern=r"^https?://[^/?#@]+(/[^?#]*)?$")
    """
    Address of this control plane for executor callbacks, in addition to the link; no callbacks if
    not set.
    """


class LocalSettings(Group):
    bubblewrap: str = "bwrap"
    """Name or path of bubblewrap."""
    python: Path | None = None
    """Interpreter of the template `python`; the one that runs Atoll if not set."""
    fork_server: bool = True
    """
    Whether instances of templates without an interpreter of their own are forks of one warm
    interpreter, if Atoll runs as root. They start faster and need less memory, but all of them have
    the same address layout and hash seed.
    """
    template_roots: ColonSeparated[Path] = ()
    """
    Directories in which a template's root file system and interpreter must be, separated by colons;
    `<data_dir>/rootfs` is always allowed. "/" allows every path.
    """
    cgroup_root: Path = Path("/sys/fs/cgroup")
    """Where the cgroup file systems are mounted."""
    cgroup_name: str = Field("atoll", pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of the cgroup that contains all instances."""
    delegation: bool = True
    """
    Whether a server without root asks the user's systemd for a delegated cgroup (version 2), if
    that systemd keeps running after logout (`loginctl enable-linger`).
    """
    uid_base: int = Field(1_900_000_000, ge=100_000)
    """First host uid for instances, if Atoll runs as root."""
    uid_count: int = Field(200_000_000, ge=1000)
    """Number of host uids from there on."""
    build_uid: int = Field(1_899_900_000, ge=100_000)
    """First of the 65 536 host uids that install Debian packages, if Atoll runs as root."""
    open_files: int = Field(1024, ge=64)
    """Open files per sandboxed process."""
    tmp_size: int = Field(64 * MiB, ge=1 * MiB)
    """Size of /tmp and of /dev/shm inside, in bytes each; it counts as memory."""
    s3fs: str = "s3fs"
    """Name or path of s3fs, which mounts volumes and workspaces in the bucket."""
    mount_scratch: int = Field(4 * GiB, ge=64 * MiB)
    """
    Disk space of the node that one s3fs mount may use for open files, in bytes; a larger file
    cannot be written there.
    """
    mount_memory: int = Field(512 * MiB, ge=64 * MiB)
    """Memory of one s3fs process, in bytes. If it needs more, it is killed and replaced."""


class DockerSettings(Group):
    url: str | None = Field(None, pattern=r"^(unix:///.+|tcp://.+)$")
    """
    The engine: unix:///path or tcp://host:port. If not set, `DOCKER_HOST`, else
    unix:///var/run/docker.sock.
    """
    tls_ca: Path | None = None
    """Certificate authority of an engine at tcp://, PEM; with it the connection is TLS."""
    tls_cert: Path | None = None
    """Client certificate of Atoll for that engine, PEM."""
    tls_key: Path | None = None
    """Its private key, PEM."""
    insecure: bool = False
    """Allow an engine at tcp:// without TLS beyond loopback: any client of it is root there."""
    image: str = "python:3.11-slim"
    """Image of the template `python`."""
    runtime: str = ""
    """Default OCI runtime of templates, such as runc or runsc; the engine's default if empty."""
    build_network: str = Field("none", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """
    The engine's network for commands of Dockerfiles, such as bridge. With none, Dockerfiles that
    make the engine download a URL are refused too.
    """
    build_memory: int = Field(2 * GiB, ge=64 * MiB)
    """Memory of each command of a Dockerfile, in bytes."""
    build_args: dict[str, str] = Field({}, repr=False)
    """Build arguments (ARG) of every Dockerfile, such as https_proxy; image histories show them."""
    storage: Literal["auto", "directories", "volumes"] = "auto"
    """
    Where workspaces are stored: in `data_dir`, which needs root and the same path on the engine, or
    in volumes of the engine. `auto` uses `data_dir` if it can.
    """
    timeout: Seconds = Field(timedelta(seconds=60), gt=timedelta(0))
    """Time for the engine to answer, in seconds; not for pulls and builds."""
    open_files: int = Field(1024, ge=64)
    """Open files per sandboxed process."""
    tmp_size: int = Field(64 * MiB, ge=1 * MiB)
    """Size of /tmp and of /dev/shm inside, in bytes each; it counts as memory."""


class KubernetesSettings(Group):
    kubeconfig: Path | None = None
    """
    The kubeconfig of the cluster. If not set: `KUBECONFIG`, the service account of Atoll's own pod,
    or ~/.kube/config.
    """
    context: str = ""
    """The context in the kubeconfig; its current one if empty."""
    namespace: str = Field("", pattern=r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?$")
    """The namespace of instances; that of the context or of Atoll's own pod if empty."""
    node: str = Field("kubernetes", pattern=r"^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$")
    """
    The cluster's name as a node of Atoll. Replicas that use the same cluster and namespace have the
    same name; several clusters have different ones.
    """
    image: str = "python:3.11-slim"
    """Image of the template `python`."""
    interpreter_image: str = ""
    """
    An image of Atoll, whose interpreter is lent to images without Python; those are refused if
    empty.
    """
    image_pull_secrets: ColonSeparated[str] = ()
    """Secrets of the namespace with credentials of registries, separated by colons."""
    image_pull_timeout: Seconds = Field(timedelta(minutes=10), gt=timedelta(0))
    """Time for a machine to pull an image, in seconds."""
    workspaces: Literal["directories", "claims"] = "directories"
    """
    Where workspaces are: in directories of pods, which continue from checkpoints on other machines,
    or in persistent volume claims.
    """
    storage_class: str = ""
    """StorageClass of claims; the cluster's default if empty."""
    access_mode: Literal["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"] = "ReadWriteOnce"
    """Access mode of claims."""
    bucket_claim: str = Field("", pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$")
    """
    A persistent volume claim of the namespace whose volume is the bucket of `blob.url`, mounted by
    a CSI driver: for volumes, and for workspaces that are mounted. If empty, there are none.
    """
    runtime_class: str = ""
    """Default RuntimeClass of templates, such as gvisor or kata; the cluster's default if empty."""
    runtime_classes: ColonSeparated[str] = ()
    """RuntimeClasses that templates may name, separated by colons."""
    priority_class: str = ""
    """PriorityClass of instances; the cluster's default if empty."""
    node_selector: dict[str, str] = {}
    """Labels of the machines on which instances may run."""
    tolerations: list[dict[str, str | int]] = []
    """Tolerations of instances, as in a pod."""
    lost_after: Seconds = Field(timedelta(seconds=10), ge=timedelta(0))
    """Time after which the cluster gives up pods of a machine that does not answer, in seconds."""
    schedule_timeout: Seconds = Field(timedelta(seconds=60), gt=timedelta(0))
    """Time for the cluster to find a machine for an instance, in seconds."""
    termination_grace: Seconds = Field(timedelta(seconds=30), gt=timedelta(seconds=10))
    """
    Time between the notice that an instance is evicted and its end, in seconds. In it a checkpoint
    is taken.
    """
    link: Literal["auto", "direct", "forward"] = "auto"
    """
    How executors are reached: at the addresses of their pods (`direct`), or through the API server
    (`forward`). `auto` is `direct` if Atoll itself runs in the cluster.
    """
    open_network: bool = False
    """
    Make instances although the cluster does not enforce network policies: user code can reach
    everything that pods can reach.
    """
    control_plane: dict[str, str] = {"app.kubernetes.io/name": "atoll"}
    """Labels of Atoll's own pods, which alone may connect to instances."""
    control_plane_addresses: CommaSeparated[str] = ()
    """
    Address ranges (CIDR) from which an Atoll outside of the cluster connects to instances with
    `link` direct, separated by commas.
    """
    cpu_request: float = Field(0.1, gt=0, le=1)
    """Share of an instance's CPU limit that is reserved for it."""
    memory_request: float = Field(0.25, gt=0, le=1)
    """Share of an instance's memory limit that is reserved for it."""
    cpus: int = Field(64, ge=1)
    """Processors of the cluster for instances; a quota of the namespace takes precedence."""
    memory: int = Field(256 * GiB, ge=GiB)
    """Memory of the cluster for instances, in bytes; a quota of the namespace takes precedence."""
    open_files: int = Field(1024, ge=64)
    """Open files per process of an instance."""
    timeout: Seconds = Field(timedelta(seconds=10), gt=timedelta(0))
    """Time for the API server to answer, in seconds."""
    tmp_size: int = Field(64 * MiB, ge=1 * MiB)
    """Size of /tmp, /var/tmp and /dev/shm inside together, in bytes; it counts as memory."""


class TemplateSettings(Group):
    build_timeout: Seconds = Field(timedelta(seconds=1800), gt=timedelta(0))
    """Time to install the packages of a template, in seconds."""
    build_retries: int = Field(10, ge=0)
    """Retries of a build after a temporary failure."""
    build_backoff: Seconds = Field(timedelta(seconds=1), ge=timedelta(0))
    """Pause before the first retry, in seconds; it grows by as much each time."""
    builds: int = Field(2, ge=1)
    """Builds that one replica runs at the same time."""
    versions: int = Field(50, ge=1)
    """Versions of a template that are kept in addition to those that sessions use."""


class PoolSettings(Group):
    size: int = Field(2, ge=0)
    """Ready instances that are kept for the template `python` at least."""
    max_size: int = Field(50, ge=0)
    """Ready instances of one template at most, whatever the demand."""
    memory_share: float = Field(0.25, gt=0, le=1)
    """Share of the node's memory that all ready instances together may take."""


class PackageSettings(Group):
    """Packages of sessions and templates."""

    index_url: str | None = Field(None, pattern=r"^https?://[^\s?#]+$", repr=False)
    """
    The package index (PEP 503 or 691), with user and password if it needs them; pip's configuration
    of this machine if not set.
    """
    ca_file: Path | None = None
    """Certificate authorities for the index, PEM; the system's if not set."""
    private_hosts: CommaSeparated[str] = ()
    """
    Private hosts that the pages of the index may link to, as `host` or `host:port`, separated by
    commas; the index itself is always allowed.
    """
    allow_source_builds: bool = False
    """Allow packages that have no wheel, which runs their build code in the installer."""
    debian_mirror: str | None = Field(None, pattern=r"^(https?://[^\s]+|file:///[^\s]*)$")
    """
    Mirror for Debian packages of templates: http, https, or file for a directory of the node. The
    sources of the base image if not set.
    """
    debian_suite: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9./-]*$|^\./$")
    """Release on that mirror; the base image's own if not set."""
    debian_components: str = Field("main", pattern=r"^[A-Za-z0-9][A-Za-z0-9 /-]*$")
    """Components of the release, separated by spaces."""
    debian_unsigned: bool = False
    """Accept a mirror that no key of the base image has signed."""
    cache_size: int = Field(10 * GiB, ge=0)
    """Installed packages that a node keeps for later sessions, in bytes."""
    memory: int = Field(2 * GiB, ge=64 * MiB)
    """Memory of an installation, in bytes."""
    disk: int = Field(8 * GiB, ge=16 * MiB)
    """Bytes that an installation may write, and download."""


class SqliteSettings(Group):
    journal_mode: str = Field("WAL", pattern="^(WAL|DELETE|TRUNCATE|PERSIST)$")
    """How changes become durable; only WAL allows reads during a write."""
    synchronous: str = Field("NORMAL", pattern="^(OFF|NORMAL|FULL|EXTRA)$")
    """When SQLite syncs to disk. With NORMAL, a power cut, not a crash, loses the last writes."""
    foreign_keys: bool = True
    """Whether SQLite enforces foreign keys."""
    cache: int = Field(64 * MiB, ge=0)
    """Page cache per connection, in bytes."""
    busy_timeout: Seconds = Field(timedelta(seconds=5), ge=timedelta(0))
    """Time to wait while another process writes, in seconds."""


class DatabaseSettings(Group):
    """Connections to MariaDB or PostgreSQL."""

    pool_size: int = Field(5, ge=1)
    """Connections that are kept open."""
    max_overflow: int = Field(10, ge=0)
    """Additional connections at a peak."""
    pool_timeout: Seconds = Field(timedelta(seconds=30), gt=timedelta(0))
    """Time to wait for a free connection, in seconds."""
    pool_recycle: Seconds = Field(timedelta(seconds=300), gt=timedelta(0))
    """Age at which a connection is replaced, in seconds."""
    pre_ping: bool = True
    """Whether a connection that was idle for a second is tested before it is used."""
    connect_timeout: Seconds = Field(timedelta(seconds=5), gt=timedelta(0))
    """Time to connect to one address, or for an idle connection to answer, in seconds."""
    operation_timeout: Seconds = Field(timedelta(seconds=10), gt=timedelta(0))
    """Time for one operation on the database, in seconds."""
    retries: int = Field(3, ge=0)
    """Retries of an idempotent read or write after a broken connection."""
    retry_backoff: Seconds = Field(timedelta(seconds=1), ge=timedelta(0))
    """Pause before the first retry, in seconds; it doubles each time."""


class RecallSettings(Group):
    """Answers from memory while the database is unavailable, marked as stale."""

    ttl: Seconds = Field(timedelta(seconds=300), ge=timedelta(0))
    """Greatest age of such an answer, in seconds."""


class CoordinationSettings(Group):
    lease_ttl: Seconds = Field(timedelta(seconds=90), gt=timedelta(0))
    """
    Time after which a lease that is not renewed expires, in seconds. It is renewed after a third of
    that.
    """
    presence_ttl: Seconds = Field(timedelta(seconds=15), gt=timedelta(0))
    """
    Time after its last heartbeat when a replica counts as lost, in seconds. It sends one after a
    third of that.
    """
    prefix: str = Field("atoll", pattern=r"^[A-Za-z0-9_.-]+$")
    """Prefix of all keys in Redis."""
    connect_timeout: Seconds = Field(timedelta(seconds=5), gt=timedelta(0))
    """Time to connect to Redis, in seconds."""
    read_timeout: Seconds = Field(timedelta(seconds=5), gt=timedelta(0))
    """Time for Redis to answer, in seconds."""
    max_connections: int = Field(50, ge=2)
    """Connections to Redis at the same time."""


class WorkspaceSettings(Group):
    """Checkpoints of workspaces in the blob store."""

    delay: Seconds = Field(timedelta(seconds=2), ge=timedelta(0))
    """With S3: time from an execution or upload to the next checkpoint, in seconds."""
    interval: Seconds = Field(timedelta(minutes=5), gt=timedelta(0))
    """With S3: time between two checkpoints while code keeps running, in seconds."""
    keep: Seconds = Field(timedelta(hours=24), ge=timedelta(0))
    """How long the files of a session are kept after its end, in seconds."""
    backups: int = Field(2, ge=1, le=100)
    """
    Consistent checkpoints of a workspace that are kept at least; content that they share is stored
    once.
    """


class BlobSettings(Group):
    """The blob store: files of sessions, and executions too large for the database."""

    url: str | None = None
    """
    Where blobs are stored: s3://bucket or s3://bucket/prefix; `<data_dir>/blobs` if not set. The
    settings that follow are for S3.
    """
    endpoint: str | None = None
    """Address of the server, such as https://s3.example.com; AWS if not set."""
    region: str | None = Field(None, pattern=r"^[A-Za-z0-9-]{1,64}$")
    """Region of the bucket; us-east-1 if neither this nor AWS_REGION is set."""
    access_key_id: SecretStr | None = None
    """
    Access key. If not set, the credentials of the environment (`AWS_…`) or the machine are used.
    """
    secret_access_key: SecretStr | None = None
    """Secret of the access key."""
    path_style: bool | None = None
    """
    Whether URLs have the bucket's name in the path instead of the host name; by default only if
    `endpoint` is set.
    """
    direct_links: bool = True
    """
    Whether links to files may lead directly to the S3 server; set it to false if clients cannot
    reach that server.
    """
    encryption: Literal["AES256", "aws:kms"] | None = None
    """Encryption at rest that is requested; the bucket's default if not set."""
    kms_key_id: str | None = Field(None, min_length=1)
    """Key for `aws:kms`; the account's default key if not set."""
    ca_file: Path | None = None
    """Additional certificate authorities for the server, PEM."""
    proxy_url: SecretStr | None = None
    """HTTP proxy to the server; the environment's if not set."""
    connect_timeout: Seconds = Field(timedelta(seconds=3), gt=timedelta(0))
    """Time to connect, in seconds."""
    timeout: Seconds = Field(timedelta(seconds=30), gt=timedelta(0))
    """Time for one request, in seconds; a large object needs many requests."""
    retry_after: Seconds = Field(timedelta(seconds=5), gt=timedelta(0))
    """Pause after a failure before the server is tried again, in seconds."""
    spool_size: int = Field(10 * GiB, ge=1 * MiB)
    """Bytes that may wait in `<data_dir>/spool` while the server is unavailable."""
    spool_ttl: Seconds = Field(timedelta(hours=24), gt=timedelta(0))
    """How long a blob waits there until it is dropped, in seconds."""

    @property
    def bucket_and_prefix(self) -> tuple[str, str]:
        """Bucket and prefix of `url`."""
        assert self.url is not None
        bucket, _, prefix = self.url.removeprefix("s3://").strip("/").partition("/")
        return bucket, prefix

    @field_validator("url")
    @classmethod
    def _is_a_bucket(cls, url: str | None) -> str | None:
        # The value is not shown: it may contain a secret, which must not be logged.
        if url is not None and _BUCKET_URL.fullmatch(url) is None:
            raise ValueError("must be s3://bucket or s3://bucket/prefix, without credentials")
        return url

    @field_validator("endpoint")
    @classmethod
    def _is_a_host(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and re.fullmatch(r"https?://[^/?#@\s]+/?", endpoint) is None:
            raise ValueError("must be https://host or https://host:port")
        return endpoint

    @model_validator(mode="after")
    def _s3_settings_are_consistent(self) -> Self:
        if self.url is None:
            only = ("endpoint", "region", "access_key_id", "secret_access_key", "path_style",
                    "encryption", "kms_key_id", "ca_file", "proxy_url")  # fmt: skip
            for name in only:
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} needs url")
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("set both access_key_id and secret_access_key, or neither")
        if self.kms_key_id is not None and self.encryption != "aws:kms":
            raise ValueError("kms_key_id needs encryption aws:kms")
        return self


class SecretSettings(Group):
    """Encryption of the secrets of sessions."""

    key: SecretStr | None = None
    """
    Key that encrypts secrets: 32 bytes, in base64 or hexadecimal. If not set and the database is in
    `data_dir`, Atoll creates one in `<data_dir>/secret-key`.
    """
    old_keys: CommaSeparated[SecretStr] = ()
    """Former keys, which still decrypt what they encrypted, separated by commas."""

    @field_validator("key", "old_keys")
    @classmethod
    def _are_keys(cls, value: Any) -> Any:
        for key in value if isinstance(value, tuple) else (value,):
            if key is not None:
                parse_key(key.get_secret_value())
        return value

    @model_validator(mode="after")
    def _new_before_old(self) -> Self:
        if self.old_keys and self.key is None:
            raise ValueError("old_keys needs key, which encrypts new secrets")
        return self


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="ATOLL_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs TLS or `insecure`."""
    driver: Literal["local", "docker", "kubernetes"] = "local"
    """What runs instances: bubblewrap on this machine, a Docker engine, or a Kubernetes cluster."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    workers: int = Field(1, ge=1, le=64)
    """Server processes; more than one needs `redis_url`."""
    data_dir: Path = Field(default_factory=default_data_dir, validate_default=True)
    """Directory of the database, the API key and the workspaces; readable by its owner only."""
    database_url: str | None = Field(None, min_length=1, repr=False)
    """
    The database: sqlite:///path, mysql://user:password@host/name (MariaDB) or
    postgresql://user:password@host/name. `<data_dir>/atoll.db` if not set.
    """
    database_urls: CommaSeparated[str] = Field((), repr=False)
    """
    Several addresses of one database instead, separated by commas; the first that answers is used.
    """
    redis_url: str | None = Field(None, min_length=1, repr=False)
    """
    Redis for several replicas, redis:// or rediss://; without it only one replica may use a
    database.
    """
    api_key: str | None = Field(None, min_length=16, repr=False)
    """The first API key. If not set, Atoll creates one in `<data_dir>/key`."""
    tls_cert: Path | None = None
    """Certificate chain for HTTPS, PEM."""
    tls_key: Path | None = None
    """Its private key, PEM."""
    insecure: bool = False
    """Allow listening beyond loopback without TLS."""
    cors_origins: CommaSeparated[str] = ()
    """Web origins whose pages may call the API, separated by commas."""
    public_url: str | None = Field(None, pattern=r"^https?://[^/?#@]+(/[^?#]*)?$")
    """
    Public URL of this server, for the links that it creates. If not set, the address that a request
    was sent to, provided it is one of this server.
    """
    trusted_hosts: CommaSeparated[str] = ()
    """
    Host names (or name:port) of this server that links may use, separated by commas; its addresses,
    its host name and loopback are always allowed.
    """
    max_body: int = Field(8 * MiB, ge=1024)
    """Largest request body, in bytes; uploads have a limit of their own."""
    max_upload: int = Field(1 * GiB, ge=1024)
    """Largest upload, in bytes."""
    idempotency_ttl: Seconds = Field(timedelta(hours=24), gt=timedelta(0))
    """How long the answer to a request with an `Idempotency-Key` is kept, in seconds."""
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$")
    """Lowest level that is logged."""
    log_json: bool = False
    """Log JSON lines instead of readable ones."""
    shutdown_timeout: Seconds = Field(timedelta(seconds=30), ge=timedelta(0))
    """Time for running requests to finish at shutdown, in seconds."""

    connection: ConnectionSettings = ConnectionSettings()
    session: SessionSettings = SessionSettings()
    archive: ArchiveSettings = ArchiveSettings()
    node: NodeSettings = NodeSettings()
    event: EventSettings = EventSettings()
    execution: ExecutionSettings = ExecutionSettings()
    link: LinkSettings = LinkSettings()
    local: LocalSettings = LocalSettings()
    docker: DockerSettings = DockerSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
    template: TemplateSettings = TemplateSettings()
    pool: PoolSettings = PoolSettings()
    sqlite: SqliteSettings = SqliteSettings()
    database: DatabaseSettings = DatabaseSettings()
    recall: RecallSettings = RecallSettings()
    coordination: CoordinationSettings = CoordinationSettings()
    workspace: WorkspaceSettings = WorkspaceSettings()
    blob: BlobSettings = BlobSettings()
    packages: PackageSettings = PackageSettings()
    secrets: SecretSettings = SecretSettings()

    @model_validator(mode="after")
    def _cluster_has_what_it_needs(self) -> Self:
        if self.driver != "kubernetes":
            return self
        if self.blob.url is None:
            raise ValueError(
                "driver kubernetes needs blob.url: files of a session end with its pod, and "
                "continue from a checkpoint in the bucket"
            )
        if (self.database_url or self.database_urls) and self.redis_url is None:
            # Elsewhere the lock of the data directory keeps a second server from a node.
            raise ValueError(
                "driver kubernetes needs redis_url with this database: several servers would "
                "otherwise use the cluster without knowing of each other"
            )
        return self

    @field_validator("trusted_hosts")
    @classmethod
    def _in_lower_case(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.lower() for name in names)

    @field_validator("data_dir")
    @classmethod
    def _real_place(cls, path: Path) -> Path:
        # Our other processes have other working directories, and the kernel reports real paths.
        try:
            return path.expanduser().resolve()
        except (OSError, RuntimeError) as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _one_database_setting(self) -> Self:
        if self.database_url is not None and self.database_urls:
            raise ValueError("set database_url or database_urls, not both")
        return self

    @model_validator(mode="after")
    def _tls_is_a_pair(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("set both tls_cert and tls_key, or neither")
        return self

    @classmethod
    def read(cls, **given: Any) -> Settings:
        """Settings from `given`, where None means not given, and from the environment."""
        refuse_unknown_variables(os.environ)
        try:
            return cls(**{name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            problems = "; ".join(
                ": ".join(filter(None, (".".join(map(str, item["loc"])), _problem(item["msg"]))))
                for item in error.errors(include_url=False, include_input=False)
            )
            raise InvalidRequest(problems, code="invalid_setting") from None


def _problem(message: str) -> str:
    return message.removeprefix("Value error, ")


def known_variables() -> set[str]:
    names = set(CLIENT_VARIABLES)
    for name, field in Settings.model_fields.items():
        group = field.annotation
        if isinstance(group, type) and issubclass(group, Group):
            names |= {f"ATOLL_{name}__{inner}".upper() for inner in group.model_fields}
        else:
            names.add(f"ATOLL_{name}".upper())
    return names


def refuse_unknown_variables(environ: Any) -> None:
    unknown = sorted(
        name for name in environ if name.startswith("ATOLL_") and name not in known_variables()
    )
    if unknown:
        raise InvalidRequest(
            f"Unknown setting: {', '.join(unknown)}. See docs/reference/settings.md.",
            code="unknown_setting",
        )
