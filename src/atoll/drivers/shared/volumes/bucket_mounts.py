"""
Mounts prefixes of the blob store's bucket as directories of this node, with s3fs.

s3fs runs outside every sandbox and alone has the credentials: they are in a file that only root can
read, never on a command line. User code decides how much s3fs has to do. So each s3fs has its own
control group, where the node has them, and caches open files on a file system of limited size,
where the node has images; elsewhere it leaves room on the node's disk. Blocking; callers use a
thread.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from atoll.drivers.shared import cgroups

if TYPE_CHECKING:
    from datetime import timedelta

    from atoll.model.resources import Resources

STAT_SECONDS = 10
"""Seconds that s3fs caches the attributes of an object, which another node may change."""
STAT_ENTRIES = 20_000
MAX_RETRIES = 1
"""Retries of a request by s3fs."""
FUSE = Path("/dev/fuse")
PROCESSES = 1024
"""Threads of one s3fs: one for each waiting system call of user code, and those for S3."""
OPEN_FILES = 4096
"""Open files and connections of one s3fs."""
DISK_RESERVE = 1024
"""Megabytes of the node's disk that an s3fs without its own file system leaves free."""
KILL_TIMEOUT = 10.0
GROUP = "mount-"
"""Prefix of the names of control groups of mounts."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Bucket:
    """Where objects are, and the credentials."""

    name: str
    prefix: str
    endpoint: str
    path_style: bool
    connect_timeout: timedelta
    timeout: timedelta
    region: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    encryption: str | None = None
    kms_key_id: str | None = None
    ca_file: Path | None = None
    proxy_url: str | None = field(default=None, repr=False)


class BucketMounts:
    def __init__(self, program: str, node: Path, bucket: Bucket | None, limits: Resources) -> None:
        """`limits` are those of each s3fs."""
        self._program = program
        self._bucket = bucket
        self._passwords = node / "s3fs.passwd"
        self._limits = limits
        self._groups = cgroups.ControlGroups()

    def open(self, groups: cgroups.ControlGroups) -> None:
        """Write the credentials for s3fs; atomically, because other replicas start s3fs too."""
        self._groups = groups
        bucket = self._bucket
        if self.problem() is not None or bucket is None or bucket.access_key_id is None:
            self._passwords.unlink(missing_ok=True)
            return
        temporary = self._passwords.with_name(f".s3fs.{secrets.token_hex(4)}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as file:
            file.write(f"{bucket.access_key_id}:{bucket.secret_access_key}\n")
        temporary.replace(self._passwords)

    def problem(self) -> str | None:
        """Why nothing of the bucket can be mounted here; None if it can."""
        if self._bucket is None:
            return "blobs are not on S3 (blob.url)"
        if os.geteuid() != 0:
            return "only root can mount it for others"
        if shutil.which(self._program) is None:
            return f"{self._program} is not installed"
        if not FUSE.exists():
            return f"{FUSE} does not exist"
        if self._bucket.encryption == "aws:kms" and self._bucket.kms_key_id is None:
            return "s3fs needs blob.kms_key_id to be set for the encryption aws:kms"
        return None

    def start(
        self, prefix: str | None, top: Path, output: int, uid: int | None, *, bounded: bool
    ) -> subprocess.Popen[bytes]:
        """
        Start an s3fs that mounts the prefix, or the bucket, at `files` in the directory `top`. All
        files belong to `uid`, which alone can access them; without a uid every uid can read and
        write them. Open files are cached in `scratch` there, which is `bounded` if it is a file
        system of its own. Output goes to the descriptor `output`. Call `end` with the name of
        `top` afterwards.
        """
        assert self._bucket is not None
        bucket = self._bucket
        source = bucket.name if prefix is None else f"{bucket.name}:/{self._key(prefix)}"
        owner = "umask=0000" if uid is None else f"uid={uid},gid={uid},umask=0077"
        options = [
            f"url={bucket.endpoint}",
            "allow_other,nosuid,nodev",
            owner,
            f"connect_timeout={_seconds(bucket.connect_timeout)}",
            f"readwrite_timeout={_seconds(bucket.timeout)}",
            f"retries={MAX_RETRIES}",
            f"stat_cache_expire={STAT_SECONDS}",
            f"max_stat_cache_size={STAT_ENTRIES}",
            f"tmpdir={top / 'scratch'}",
            "dbglevel=crit",
        ]
        if not bounded:
            # s3fs does not start with less free space, so at most half of it.
            free = shutil.disk_usage(top).free // 2**20
            options.append(f"ensure_diskfree={min(DISK_RESERVE, free // 2)}")
        if bucket.path_style:
            options.append("use_path_request_style")
        if bucket.region is not None:
            options.append(f"endpoint={bucket.region}")
        if bucket.encryption == "AES256":
            options.append("use_sse=1")
        elif bucket.encryption == "aws:kms":
            options.append(f"use_sse=kmsid:{bucket.kms_key_id}")
        environment = {"PATH": "/usr/bin:/bin", **self._environment()}
        if bucket.access_key_id is not None:
            options.append(f"passwd_file={self._passwords}")
        elif "AWSACCESSKEYID" not in environment:
            options.append("iam_role=auto")
        group = GROUP + top.name
        self._groups.make(group, self._limits)
        process = subprocess.Popen(
            [self._program, source, str(top / "files"), "-f", "-o", ",".join(options)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # It outlives the server, like the instances that use it.
            start_new_session=True,
            cwd="/",
            env=environment,
        )
        # No instance has the mount yet. If s3fs has ended already, `NodeMounts` notices.
        try:
            with contextlib.suppress(ProcessLookupError):
                cgroups.enter(self._groups, group, process.pid)
                _, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
                limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
                resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (limit, limit))
                # A core dump would contain the credentials.
                resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
        except BaseException:
            process.kill()
            process.wait()
            raise
        return process

    def end(self, name: str) -> bool:
        """
        Remove the control group of a mount, and end an s3fs in it that was not recorded. Does
        nothing if the group does not exist. False if a process does not end.
        """
        group = GROUP + name
        if self._groups.memory_kills(group):
            log.warning("mount.out_of_memory", name=name, memory=self._limits.memory)
        return cgroups.kill_and_remove(self._groups, group, KILL_TIMEOUT)

    def close(self) -> None:
        self._groups.close()

    def _key(self, prefix: str) -> str:
        assert self._bucket is not None
        return "/".join(part for part in (self._bucket.prefix, prefix) if part)

    def directory(self, prefix: str, root: Path) -> Path:
        """The directory of the prefix in a mount of the bucket."""
        return root / self._key(prefix)

    def _environment(self) -> dict[str, str]:
        """Credentials of the server's environment by s3fs's names, the CA and the proxy."""
        assert self._bucket is not None
        found: dict[str, str] = {}
        if self._bucket.access_key_id is None:
            for ours, theirs in (
                ("AWS_ACCESS_KEY_ID", "AWSACCESSKEYID"),
                ("AWS_SECRET_ACCESS_KEY", "AWSSECRETACCESSKEY"),
                ("AWS_SESSION_TOKEN", "AWSSESSIONTOKEN"),
            ):
                if ours in os.environ:
                    found[theirs] = os.environ[ours]
        if self._bucket.ca_file is not None:
            found["CURL_CA_BUNDLE"] = str(self._bucket.ca_file)
        if self._bucket.proxy_url is not None:
            found |= {"http_proxy": self._bucket.proxy_url, "https_proxy": self._bucket.proxy_url}
        return found


def _seconds(time: timedelta) -> int:
    return max(1, round(time.total_seconds()))
