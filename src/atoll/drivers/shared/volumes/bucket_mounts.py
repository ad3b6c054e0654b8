"""
Prefixes of the blob store's bucket as directories of this node, by s3fs.

s3fs runs outside every sandbox and is the only one that has the credentials: they are in a file
that root alone can read, never on a command line. Code inside decides how much work it has, so each
has a control group of its own where the node has them, and what it keeps of open files is on a file
system of a size of its own where the node has images; elsewhere it leaves room on the node's disk.
Blocking; callers use a thread.
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
"""How long s3fs believes what it knows of an object; another node may have changed it."""
STAT_ENTRIES = 20_000
TRIES = 1
"""How often s3fs repeats a request that failed."""
FUSE = Path("/dev/fuse")
PROCESSES = 1024
"""Threads of one s3fs: one for each call of user code that waits, and those that ask S3."""
OPEN_FILES = 4096
"""Files that user code has open in one mount at most, about, and connections to S3."""
DISK_RESERVE = 1024
"""Megabytes of the node's disk that no s3fs uses which has no file system of its own."""
END_SECONDS = 10.0
GROUP = "mount-"
"""What the name of a mount's control group begins with."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Bucket:
    """Where objects are, and by what right."""

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
        self._groups: cgroups.ControlGroups = cgroups.NoControlGroups()

    def open(self, groups: cgroups.ControlGroups) -> None:
        """Write the credentials down, for s3fs alone; whole, as other replicas start it too."""
        self._groups = groups
        bucket = self._bucket
        if self.trouble() is not None or bucket is None or bucket.access_key_id is None:
            self._passwords.unlink(missing_ok=True)
            return
        temporary = self._passwords.with_name(f".s3fs.{secrets.token_hex(4)}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as file:
            file.write(f"{bucket.access_key_id}:{bucket.secret_access_key}\n")
        temporary.replace(self._passwords)

    def trouble(self) -> str | None:
        """Why nothing of a bucket can be mounted here; none when it can."""
        if self._bucket is None:
            return "blobs are not on S3 (blob.url)"
        if os.geteuid() != 0:
            return "only root can mount it for others"
        if shutil.which(self._program) is None:
            return f"{self._program} is not installed"
        if not FUSE.exists():
            return f"{FUSE} is not there"
        if self._bucket.encryption == "aws:kms" and self._bucket.kms_key_id is None:
            return "s3fs needs blob.kms_key_id to be set for the encryption aws:kms"
        return None

    def start(
        self, prefix: str | None, top: Path, output: int, uid: int | None, *, bounded: bool
    ) -> subprocess.Popen[bytes]:
        """
        An s3fs that mounts the prefix, or the whole bucket, at `files` in the directory `top`. All
        in it belongs to `uid`, who alone can see it; without one everybody can read and write it.
        It keeps open files in `scratch` there, which is `bounded` when it is a file system of its
        own, and prints to the descriptor `output`. `end` has to be called with the name of `top`.
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
            f"retries={TRIES}",
            f"stat_cache_expire={STAT_SECONDS}",
            f"max_stat_cache_size={STAT_ENTRIES}",
            f"tmpdir={top / 'scratch'}",
            "dbglevel=crit",
        ]
        if not bounded:
            # It does not start with less, so no more than half of what there is.
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
        environment = {"PATH": "/usr/bin:/bin", **self._surroundings()}
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
            # It outlives the server, as the instances that use it do.
            start_new_session=True,
            cwd="/",
            env=environment,
        )
        # No instance has the mount yet. One that ended at once is found by who waits for it.
        try:
            with contextlib.suppress(ProcessLookupError):
                cgroups.enter(self._groups, group, process.pid)
                _, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
                most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
                resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (most, most))
                # It would have the credentials in it.
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
        return cgroups.kill_and_remove(self._groups, group, END_SECONDS)

    def close(self) -> None:
        self._groups.close()

    def _key(self, prefix: str) -> str:
        assert self._bucket is not None
        return "/".join(part for part in (self._bucket.prefix, prefix) if part)

    def directory(self, prefix: str, root: Path) -> Path:
        """The prefix in a mount of the whole bucket."""
        return root / self._key(prefix)

    def _surroundings(self) -> dict[str, str]:
        """Credentials of the server's own environment, by the names that s3fs knows, and others."""
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
