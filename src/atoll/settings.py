"""
Every setting, its default and its unit.

Read once, in `app`, and handed down. A setting comes from its argument, else from the
environment variable `ATOLL_<NAME>` (in a group: `ATOLL_<GROUP>__<NAME>`), else from the default
here. A variable that starts with `ATOLL_` and names no setting is an error, so that a misspelt one
cannot pass for set.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Self

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
    """The environment has only text, and a number there is one of seconds."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


Seconds = Annotated[timedelta, BeforeValidator(_seconds)]


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
        raise ValueError(f"{KEY_BYTES} bytes in base64 or hexadecimal are needed")
    return key


class Group(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class ConnectionSettings(Group):
    """Connections of clients, and what one process holds for them at most."""

    max_connections: int = Field(4096, ge=1)
    """
    Open connections; at most half of the descriptors that the process may have. Health checks are
    served beyond it.
    """
    keep_alive: Seconds = Field(timedelta(seconds=75), gt=timedelta(0))
    """Time between two requests on one connection, in seconds."""
    max_streams: int = Field(1000, ge=1)
    """Open event streams and consoles; one key may have half of them."""
    answer_memory: int = Field(256 * MiB, ge=1 * MiB)
    """
    Bytes of large answers, and of finished executions that are streamed, which clients have not
    read yet; one key may have half of it.
    """


class SessionSettings(Group):
    timeout: Seconds = Field(timedelta(seconds=300), gt=timedelta(0))
    """Life of a session that names none, in seconds."""
    max_timeout: Seconds = Field(timedelta(days=1), gt=timedelta(0))
    """Longest life that a session may ask for, in seconds."""
    cpu: float = Field(1.0, gt=0)
    """Cores of a session that names none, when its template names none either."""
    memory: int = Field(512 * MiB, ge=16 * MiB)
    """Memory of such a session, in bytes."""
    disk: int = Field(1 * GiB, ge=1 * MiB)
    """Workspace size of such a session, in bytes."""
    max_processes: int = Field(128, ge=4)
    """Processes and threads of such a session."""
    max_cpu: float = Field(64.0, gt=0)
    """Most cores that a session may ask for."""
    max_memory: int = Field(64 * GiB, ge=16 * MiB)
    """Most memory that a session may ask for, in bytes."""
    max_disk: int = Field(256 * GiB, ge=1 * MiB)
    """Largest workspace that a session may ask for, in bytes."""
    idle_timeout: Seconds | None = Field(None, gt=timedelta(0))
    """Time without requests after which a session that names none is stopped, in seconds."""
    archive_after: Seconds | None = Field(None, gt=timedelta(0))
    """Time at rest after which a session that names none is archived, in seconds."""
    delete_after: Seconds | None = Field(None, gt=timedelta(0))
    """Time at rest after which a session that names none ends, in seconds."""
    sweep: Seconds = Field(timedelta(seconds=10), gt=timedelta(0))
    """
    Time between two looks for sessions that are not what is wanted, and for what nobody owns, in
    seconds.
    """
    sweep_batch: int = Field(100, ge=1)
    """Sessions taken in one such look."""
    timer_sweep: Seconds = Field(timedelta(seconds=60), gt=timedelta(0))
    """Time between two looks for sessions whose time is over or that are idle, in seconds."""
    timer_batch: int = Field(10, ge=1)
    """Sessions seen to at once in one such look."""
    stop_grace: Seconds = Field(timedelta(seconds=10), ge=timedelta(0))
    """Time for what runs in a session to end when it is stopped, in seconds."""
    retries: int = Field(5, ge=0)
    """How often in a row a session may fail to become what is wanted before it is in `error`."""


class ArchiveSettings(Group):
    """Sessions whose files are moved to the blob store."""

    concurrency: int = Field(3, ge=1)
    """Sessions that are archived at the same time on one node."""
    retries: int = Field(3, ge=0)
    """How often a backup is tried again before the session is in `error`."""
    timeout: Seconds = Field(timedelta(minutes=120), gt=timedelta(0))
    """Time for archiving one, in seconds."""


class NodeSettings(Group):
    """This node, as the control planes of others see it, and what this one does about others."""

    url: str | None = Field(None, pattern=r"^https?://[^/?#@]+$")
    """
    Address at which the control planes of other nodes reach this one; the one it listens on when
    not set.
    """
    labels: dict[str, str] = {}
    """What sessions can ask for in a node: a JSON object of names and values."""
    max_sessions: int | None = Field(None, ge=1)
    """Sessions with an instance that the node takes; as many as its memory holds when not set."""
    spread_above: int = Field(35, ge=0)
    """Running sessions on a node above which others are preferred."""
    probe: Seconds = Field(timedelta(seconds=10), gt=timedelta(0))
    """Time between two probes of a node, and between two reports of its own, in seconds."""
    probe_timeout: Seconds = Field(timedelta(seconds=5), gt=timedelta(0))
    """Time for a node to answer a probe, in seconds."""
    ca_file: Path | None = None
    """Certificates, PEM, that vouch for nodes with https addresses; the usual ones when not set."""
    unhealthy_after: int = Field(3, ge=1)
    """Failed probes in a row after which a node gets no work and its sessions move."""
    drain_grace: Seconds = Field(timedelta(seconds=300), ge=timedelta(0))
    """
    How long a session that is to leave may go on with what runs in it, in seconds; what runs then
    is ended, and tried again on its next node.
    """


class EventSettings(Group):
    """The feed of what changed, and the webhooks that are told."""

    keep: Seconds = Field(timedelta(hours=24), ge=timedelta(0))
    """How long events can be read, in seconds."""
    webhook_retries: int = Field(8, ge=0)
    """How often one delivery is tried again, after pauses that double up to five minutes."""
    webhook_private: bool = False
    """Whether webhooks may be at addresses that are not public, loopback included."""


class ExecutionSettings(Group):
    timeout: Seconds = Field(timedelta(seconds=30), gt=timedelta(0))
    """Time-out of an execution that names none, in seconds."""
    max_timeout: Seconds = Field(timedelta(seconds=1800), gt=timedelta(0))
    """Longest time-out that an execution may ask for, in seconds."""
    output_limit: int = Field(1 * MiB, ge=1024, le=128 * MiB)
    """Bytes kept of stdout, and of stderr; the rest is counted and dropped."""
    return_limit: int = Field(1 * MiB, ge=1024, le=128 * MiB)
    """Largest return value, in bytes of JSON."""
    max_wait: Seconds = Field(timedelta(seconds=300), gt=timedelta(0))
    """Longest `wait` of one request, in seconds."""
    queue_limit: int = Field(100, ge=1)
    """Executions that may wait for one session; one more is refused."""
    retries: int = Field(3, ge=0)
    """How often an execution is tried again whose instance was lost by no fault of its code."""
    retry_backoff: Seconds = Field(timedelta(seconds=1), ge=timedelta(0))
    """Pause before the first of these, in seconds; it doubles each time."""
    retry_max_backoff: Seconds = Field(timedelta(seconds=10), ge=timedelta(0))
    """Longest such pause, in seconds."""
    cancel_grace: Seconds = Field(timedelta(seconds=2), ge=timedelta(0))
    """Time between SIGTERM and SIGKILL of an execution that is cancelled, in seconds."""
    approval_timeout: Seconds = Field(timedelta(seconds=300), gt=timedelta(0))
    """How long code that asks a person waits for the answer, in seconds."""


class LinkSettings(Group):
    connect_timeout: Seconds = Field(timedelta(seconds=5), gt=timedelta(0))
    """Time for an instance that is up to say hello on a new connection, in seconds."""
    start_timeout: Seconds = Field(timedelta(seconds=30), gt=timedelta(0))
    """Time for a new instance to say hello, in seconds."""
    read_timeout: Seconds = Field(timedelta(seconds=30), gt=timedelta(0))
    """Time for an executor to answer a request about files or itself, in seconds."""
    heartbeat: Seconds = Field(timedelta(seconds=5), gt=timedelta(0))
    """Time between two heartbeats of an executor that runs something, in seconds."""
    lost_after: Seconds = Field(timedelta(seconds=15), gt=timedelta(0))
    """Silence after which the instance is looked at, in seconds."""
    unattended_grace: Seconds = Field(timedelta(minutes=10), gt=timedelta(0))
    """
    Time after the end of its session at which an instance ends that no server is connected to, in
    seconds; also for a ready instance that has no session.
    """
    unattended_limit: Seconds = Field(timedelta(hours=6), gt=timedelta(0))
    """Longest time that an instance runs without a server connected to it, in seconds."""
    callback_url: str | None = Field(None, pattern=r"^https?://[^/?#@]+(/[^?#]*)?$")
    """
    Address of this control plane at which executors report what they did, besides telling it on the
    link; none when they need not.
    """


class LocalSettings(Group):
    bubblewrap: str = "bwrap"
    """Name or path of bubblewrap."""
    python: Path | None = None
    """Interpreter of the template `python`; the one that runs Atoll when not set."""
    template_roots: Annotated[tuple[Path, ...], NoDecode] = ()
    """
    Directories beneath which a template's root file system and interpreter must lie, separated by
    colons; `<data_dir>/rootfs` always counts. "/" allows every place.
    """
    cgroup_root: Path = Path("/sys/fs/cgroup")
    """Where the control group file systems are mounted."""
    cgroup_name: str = Field("atoll", pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of the control group that holds all instances."""
    delegation: bool = True
    """
    Whether a server of an ordinary user asks the user's systemd for a delegated control group when
    it has none (version 2) and that systemd outlives the last logout (`loginctl enable-linger`).
    """
    uid_base: int = Field(1_900_000_000, ge=100_000)
    """First host uid for instances, when Atoll runs as root."""
    uid_count: int = Field(200_000_000, ge=1000)
    """How many host uids from there on."""
    build_uid: int = Field(1_899_900_000, ge=100_000)
    """First of the 65 536 host uids that build templates' Debian packages, as root."""
    open_files: int = Field(1024, ge=64)
    """Open files per sandboxed process."""
    tmp_size: int = Field(64 * MiB, ge=1 * MiB)
    """Size of /tmp and of /dev/shm inside, in bytes each; it counts as memory."""
    s3fs: str = "s3fs"
    """Name or path of s3fs, by which volumes and workspaces in the bucket are mounted."""
    mount_scratch: int = Field(4 * GiB, ge=64 * MiB)
    """
    What one such mount may keep of open files on the node's disk, in bytes; a larger file cannot be
    written there.
    """
    mount_memory: int = Field(512 * MiB, ge=64 * MiB)
    """Memory of the s3fs of one such mount, in bytes. One that needs more is ended and replaced."""

    @model_validator(mode="before")
    @classmethod
    def _split_roots(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("template_roots"), str):
            values = dict(values)
            values["template_roots"] = [p for p in values["template_roots"].split(":") if p]
        return values


class DockerSettings(Group):
    url: str | None = Field(None, pattern=r"^(unix:///.+|tcp://.+)$")
    """
    The engine: unix:///path or tcp://host:port. `DOCKER_HOST` when not set, else
    unix:///var/run/docker.sock.
    """
    tls_ca: Path | None = None
    """Certificate authority of an engine at tcp://, PEM; with it the connection is TLS."""
    tls_cert: Path | None = None
    """Certificate of Atoll towards that engine, PEM."""
    tls_key: Path | None = None
    """Its private key, PEM."""
    insecure: bool = False
    """Allow an engine at tcp:// without TLS beyond loopback: whoever reaches it is root there."""
    image: str = "python:3.11-slim"
    """Image of the template `python`."""
    runtime: str = ""
    """OCI runtime of templates that name none, such as runc or runsc; the engine's own if empty."""
    build_network: str = Field("none", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """
    Network of the commands of Dockerfiles, by the engine's name for it, such as bridge. With none,
    Dockerfiles that have the engine fetch something by URL are refused too.
    """
    build_memory: int = Field(2 * GiB, ge=64 * MiB)
    """Memory of each command of a Dockerfile, in bytes."""
    build_args: dict[str, str] = Field({}, repr=False)
    """Arguments (ARG) of every Dockerfile, such as https_proxy; the image's history shows them."""
    storage: Literal["auto", "directories", "volumes"] = "auto"
    """
    Where workspaces are: in `data_dir`, which the engine must see at the same path and which takes
    root, or in volumes of the engine. `auto`: in `data_dir` where both hold.
    """
    timeout: Seconds = Field(timedelta(seconds=60), gt=timedelta(0))
    """Longest time that the engine may take to answer, in seconds; pulls and builds aside."""
    open_files: int = Field(1024, ge=64)
    """Open files per sandboxed process."""
    tmp_size: int = Field(64 * MiB, ge=1 * MiB)
    """Size of /tmp and of /dev/shm inside, in bytes each; it counts as memory."""


class TemplateSettings(Group):
    build_timeout: Seconds = Field(timedelta(seconds=1800), gt=timedelta(0))
    """Longest time that the packages of a template may take to install, in seconds."""
    build_retries: int = Field(10, ge=0)
    """How often a build is tried again after a fault that may pass."""
    build_backoff: Seconds = Field(timedelta(seconds=1), ge=timedelta(0))
    """Pause before the first of these, in seconds; it grows by as much each time."""
    builds: int = Field(2, ge=1)
    """Builds that one control plane runs at the same time."""
    versions: int = Field(50, ge=1)
    """Versions of a template that are kept beside those that sessions use."""


class PoolSettings(Group):
    size: int = Field(2, ge=0)
    """Ready instances kept for the template `python` at least."""
    max_size: int = Field(50, ge=0)
    """Most ready instances of a template, whatever is asked for."""
    memory_share: float = Field(0.25, gt=0, le=1)
    """Share of the node's memory that ready instances may be counted with, together."""


class PackageSettings(Group):
    """Packages that sessions and templates ask for."""

    index_url: str | None = Field(None, pattern=r"^https?://[^\s?#]+$", repr=False)
    """
    The package index (PEP 503 or 691), with user and password if it needs them; what pip on this
    machine is configured with when not set.
    """
    ca_file: Path | None = None
    """Certificates to trust when it is asked, PEM; the system's when not set."""
    private_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    """
    Hosts at addresses that are not public, as `host` or `host:port`, separated by commas, which the
    pages of the index may link to; its own address is always allowed.
    """
    allow_source_builds: bool = False
    """Whether packages that come as source may be built, which runs their code in the installer."""
    debian_mirror: str | None = Field(None, pattern=r"^(https?://[^\s]+|file:///[^\s]*)$")
    """
    Where Debian packages of templates come from: http, https, or file for a directory of the node.
    The sources that a base image names itself when not set.
    """
    debian_suite: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9./-]*$|^\./$")
    """Release on that mirror; the base image's own when not set."""
    debian_components: str = Field("main", pattern=r"^[A-Za-z0-9][A-Za-z0-9 /-]*$")
    """Parts of the release, separated by spaces."""
    debian_unsigned: bool = False
    """Accept a mirror that is not signed by a key of the base image."""
    cache_size: int = Field(10 * GiB, ge=0)
    """Bytes of installed packages that a node keeps for the next session that asks for them."""
    memory: int = Field(2 * GiB, ge=64 * MiB)
    """Memory of an installation, in bytes."""
    disk: int = Field(8 * GiB, ge=16 * MiB)
    """What an installation may write, and download, in bytes."""

    @model_validator(mode="before")
    @classmethod
    def _split_hosts(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("private_hosts"), str):
            hosts = values["private_hosts"].split(",")
            values = {**values, "private_hosts": [host.strip() for host in hosts if host.strip()]}
        return values


class SqliteSettings(Group):
    journal_mode: str = Field("WAL", pattern="^(WAL|DELETE|TRUNCATE|PERSIST)$")
    """How changes become durable; only with WAL do reads go on beside a write."""
    synchronous: str = Field("NORMAL", pattern="^(OFF|NORMAL|FULL|EXTRA)$")
    """When SQLite waits for the disk. With NORMAL a power cut, not a crash, loses last writes."""
    foreign_keys: bool = True
    """Whether SQLite holds foreign keys."""
    cache: int = Field(64 * MiB, ge=0)
    """Page cache per connection, in bytes."""
    busy_timeout: Seconds = Field(timedelta(seconds=5), ge=timedelta(0))
    """Time to wait for another process's write, in seconds."""


class DatabaseSettings(Group):
    """MariaDB and PostgreSQL."""

    pool_size: int = Field(5, ge=1)
    """Connections that are kept."""
    max_overflow: int = Field(10, ge=0)
    """Connections beyond that at a peak."""
    pool_timeout: Seconds = Field(timedelta(seconds=30), gt=timedelta(0))
    """Time to wait for a free connection, in seconds."""
    pool_recycle: Seconds = Field(timedelta(seconds=300), gt=timedelta(0))
    """Age at which a connection is replaced, in seconds."""
    pre_ping: bool = True
    """Whether a connection is tried before it is used."""
    connect_timeout: Seconds = Field(timedelta(seconds=5), gt=timedelta(0))
    """Time to connect to one address, or for an idle connection to answer, in seconds."""
    operation_timeout: Seconds = Field(timedelta(seconds=10), gt=timedelta(0))
    """Time for one operation on the database, in seconds."""
    retries: int = Field(3, ge=0)
    """How often a read or a write that may be repeated is tried again after a broken connection."""
    retry_backoff: Seconds = Field(timedelta(seconds=1), ge=timedelta(0))
    """Pause before the first of these, in seconds; it doubles each time."""


class RecallSettings(Group):
    """What is shown of sessions and executions while the database is away, marked as stale."""

    ttl: Seconds = Field(timedelta(seconds=300), ge=timedelta(0))
    """Greatest age of what is shown, in seconds."""


class CoordinationSettings(Group):
    lease_ttl: Seconds = Field(timedelta(seconds=90), gt=timedelta(0))
    """
    How long a lease lasts that is not renewed, in seconds. It is renewed after a third of that.
    """
    presence_ttl: Seconds = Field(timedelta(seconds=15), gt=timedelta(0))
    """
    Seconds after its last beat when a replica counts as lost. It beats after a third of that.
    """
    prefix: str = Field("atoll", pattern=r"^[A-Za-z0-9_.-]+$")
    """What the names of all keys in Redis begin with."""
    connect_timeout: Seconds = Field(timedelta(seconds=5), gt=timedelta(0))
    """Time for a connection to Redis, in seconds."""
    read_timeout: Seconds = Field(timedelta(seconds=5), gt=timedelta(0))
    """Time for Redis to answer, in seconds."""
    max_connections: int = Field(50, ge=2)
    """Most connections to Redis at the same time."""


class WorkspaceSettings(Group):
    """Sessions' files: when they are saved to the blob store, and how long that is kept."""

    delay: Seconds = Field(timedelta(seconds=2), ge=timedelta(0))
    """How long after an execution or an upload a workspace is saved on S3, in seconds."""
    interval: Seconds = Field(timedelta(minutes=5), gt=timedelta(0))
    """How often it is saved on S3 while code runs for long, in seconds."""
    keep: Seconds = Field(timedelta(hours=24), ge=timedelta(0))
    """How long the files of a session can be had after its end, in seconds."""
    backups: int = Field(2, ge=1, le=100)
    """
    Saves of a workspace that are kept at least, of those during which nothing changed; contents
    that they share are stored once.
    """


class BlobSettings(Group):
    """Large data, and code, input and output too large for a row of the database."""

    url: str | None = None
    """
    Where blobs are kept: s3://bucket or s3://bucket/prefix; `<data_dir>/blobs` when not set. All
    that follow are for S3.
    """
    endpoint: str | None = None
    """Address of the server, such as https://s3.example.com; that of AWS when not set."""
    region: str | None = Field(None, pattern=r"^[A-Za-z0-9-]{1,64}$")
    """Region of the bucket; us-east-1 when neither this nor AWS_REGION is set."""
    access_key_id: SecretStr | None = None
    """
    Access key. Without one the environment's (`AWS_…`) or the machine's own credentials are used.
    """
    secret_access_key: SecretStr | None = None
    """Its secret."""
    path_style: bool | None = None
    """
    Whether the bucket's name is in the path of addresses, instead of in front of the host's; true
    when not set but `endpoint` is.
    """
    direct_links: bool = True
    """
    Whether links to files may lead straight to the server; false where those who get them do not
    reach it.
    """
    encryption: Literal["AES256", "aws:kms"] | None = None
    """Encryption at rest that the server is asked for; what the bucket says when not set."""
    kms_key_id: str | None = Field(None, min_length=1)
    """Key for `aws:kms`; the account's own when not set."""
    ca_file: Path | None = None
    """Authorities that may have signed the server's certificate beside the usual ones, PEM."""
    proxy_url: SecretStr | None = None
    """HTTP proxy on the way to the server; that of the environment when not set."""
    connect_timeout: Seconds = Field(timedelta(seconds=3), gt=timedelta(0))
    """Time for a connection, in seconds."""
    timeout: Seconds = Field(timedelta(seconds=30), gt=timedelta(0))
    """Time for one request, of which a large object takes many, in seconds."""
    retry_after: Seconds = Field(timedelta(seconds=5), gt=timedelta(0))
    """How long a server that failed is not asked again, in seconds."""
    spool_size: int = Field(10 * GiB, ge=1 * MiB)
    """Most bytes that wait in `<data_dir>/spool` for a server that is away."""
    spool_ttl: Seconds = Field(timedelta(hours=24), gt=timedelta(0))
    """How long one waits there until it is dropped, in seconds."""

    @property
    def bucket_and_prefix(self) -> tuple[str, str]:
        """Bucket and prefix of `url`."""
        assert self.url is not None
        bucket, _, prefix = self.url.removeprefix("s3://").strip("/").partition("/")
        return bucket, prefix

    @field_validator("url")
    @classmethod
    def _is_a_bucket(cls, url: str | None) -> str | None:
        # Not shown: a secret that somebody wrote into it must not get into a log.
        if url is not None and _BUCKET_URL.fullmatch(url) is None:
            raise ValueError("give s3://bucket or s3://bucket/prefix, without credentials")
        return url

    @field_validator("endpoint")
    @classmethod
    def _is_a_host(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and re.fullmatch(r"https?://[^/?#@\s]+/?", endpoint) is None:
            raise ValueError("give https://host or https://host:port")
        return endpoint

    @model_validator(mode="after")
    def _they_fit(self) -> Self:
        if self.url is None:
            only = ("endpoint", "region", "access_key_id", "secret_access_key", "path_style",
                    "encryption", "kms_key_id", "ca_file", "proxy_url")  # fmt: skip
            for name in only:
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is of no use without url")
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key go together")
        if self.kms_key_id is not None and self.encryption != "aws:kms":
            raise ValueError("kms_key_id goes with encryption aws:kms")
        return self


class SecretSettings(Group):
    """Encryption of the secrets of sessions."""

    key: SecretStr | None = None
    """
    Key that secrets are encrypted with: 32 bytes, in base64 or hexadecimal. With the database in
    `data_dir`, one is made and kept in `<data_dir>/secret-key` when not set.
    """
    old_keys: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    """Keys that were used before and still open what they encrypted, separated by commas."""

    @model_validator(mode="before")
    @classmethod
    def _split_keys(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("old_keys"), str):
            values = dict(values)
            values["old_keys"] = [k for k in values["old_keys"].split(",") if k.strip()]
        return values

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
            raise ValueError("old_keys: set key as well, with which new secrets are encrypted")
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
    """Address to listen on. Beyond loopback it needs TLS or `insecure`."""
    driver: Literal["local", "docker"] = "local"
    """What instances are made with: bubblewrap on this machine, or a Docker engine."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    workers: int = Field(1, ge=1, le=64)
    """Processes that serve; more than one needs `redis_url`."""
    data_dir: Path = Field(default_factory=default_data_dir, validate_default=True)
    """Where the database, the key and the workspaces live; readable by its owner alone."""
    database_url: str | None = Field(None, min_length=1, repr=False)
    """
    The database: sqlite:///path, mysql://user:password@host/name (MariaDB) or
    postgresql://user:password@host/name. `<data_dir>/atoll.db` when not set.
    """
    database_urls: Annotated[tuple[str, ...], NoDecode] = Field((), repr=False)
    """
    Several addresses of one database instead, separated by commas; the first that answers is used.
    """
    redis_url: str | None = Field(None, min_length=1, repr=False)
    """
    Redis for several control planes, redis:// or rediss://; without it there can be only one on a
    database.
    """
    api_key: str | None = Field(None, min_length=16, repr=False)
    """The first key. One is made and kept in `<data_dir>/key` when not set."""
    tls_cert: Path | None = None
    """Certificate chain to serve HTTPS with, PEM."""
    tls_key: Path | None = None
    """Its private key, PEM."""
    insecure: bool = False
    """Allow listening beyond loopback without TLS."""
    cors_origins: Annotated[tuple[str, ...], NoDecode] = ()
    """Web origins whose pages may call the API, separated by commas."""
    public_url: str | None = Field(None, pattern=r"^https?://[^/?#@]+(/[^?#]*)?$")
    """
    Address under which others reach this server, for the links that it hands out. When not set, the
    one that a request came to, if that is an address of this server.
    """
    trusted_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    """
    Names, or name:port, that links may begin with when a request came to them, separated by commas;
    the server's own addresses, its host name and loopback always count.
    """
    max_body: int = Field(8 * MiB, ge=1024)
    """Largest request body other than an upload, in bytes."""
    max_upload: int = Field(1 * GiB, ge=1024)
    """Largest upload, in bytes."""
    idempotency_ttl: Seconds = Field(timedelta(hours=24), gt=timedelta(0))
    """How long the answer to a request with an `Idempotency-Key` is kept, in seconds."""
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$")
    """Least level that is logged."""
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

    @model_validator(mode="before")
    @classmethod
    def _split_lists(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        for name in ("cors_origins", "database_urls", "trusted_hosts"):
            if isinstance(values.get(name), str):
                values[name] = [item.strip() for item in values[name].split(",") if item.strip()]
        return values

    @field_validator("trusted_hosts")
    @classmethod
    def _in_lower_case(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.lower() for name in names)

    @field_validator("data_dir")
    @classmethod
    def _real_place(cls, path: Path) -> Path:
        # Other processes of ours run elsewhere, and the kernel tells of real paths only.
        try:
            return path.expanduser().resolve()
        except (OSError, RuntimeError) as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _one_way_to_name_the_database(self) -> Self:
        if self.database_url is not None and self.database_urls:
            raise ValueError("give database_url or database_urls, not both")
        return self

    @model_validator(mode="after")
    def _tls_is_a_pair(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        return self

    @classmethod
    def read(cls, **given: Any) -> Settings:
        """The settings from `given` (None means not given) and the environment."""
        refuse_unknown_variables(os.environ)
        try:
            return cls(**{name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            words = "; ".join(
                ": ".join(filter(None, (".".join(map(str, item["loc"])), _words(item["msg"]))))
                for item in error.errors(include_url=False, include_input=False)
            )
            raise InvalidRequest(words, code="invalid_setting") from None


def _words(message: str) -> str:
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
            f"No setting is named {', '.join(unknown)}. See docs/reference/settings.md.",
            code="unknown_setting",
        )
