"""
File system images: ext4 in a file, mounted by loop device, which takes root.

An image limits the bytes and inodes of a workspace, a volume or an installation by the kernel: the
disk quota. Where a node cannot mount images, the executor watches the size of the workspace
(`executor/runs/limit_enforcement.py`). Blocking file work; callers use a thread.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from atoll.drivers.shared import mount_syscalls
from atoll.errors import PermanentError, TemporaryError

LOOPS = "/sys/block"
MKFS, E2FSCK = "/sbin/mkfs.ext4", "/sbin/e2fsck"
MIN_IMAGE = 4 * 1024 * 1024
DETACH_TIMEOUT = 10.0


def make_file_system(image: Path, size: int) -> None:
    with image.open("xb") as file:
        file.truncate(size)
    # No journal, which would cost a kernel thread for each session: images are repaired before they
    # are mounted again. The inode table is initialised by the kernel when it is used.
    command = [
        MKFS, "-q", "-F", "-m", "0", "-b", "4096",
        "-O", "^has_journal,^resize_inode",
        "-E", "lazy_itable_init=1,nodiscard,root_owner=0:0",
    ]  # fmt: skip
    subprocess.run([*command, str(image)], check=True, capture_output=True, timeout=60)


def repair_image(image: Path) -> None:
    """Repair an image after an interrupted write; it may not be mounted."""
    done = subprocess.run([E2FSCK, "-p", str(image)], capture_output=True, timeout=600, check=False)
    if done.returncode > 2:
        raise PermanentError(
            f"File system image {image} is damaged and could not be repaired: "
            f"{done.stdout.decode(errors='replace')[-500:]}",
            code="workspace_damaged",
        )


def loop_device_of(image: Path) -> str | None:
    """The loop device of the image, if it is attached to one."""
    # As strings: a host may have a thousand devices.
    for name in os.listdir(LOOPS):
        if name.startswith("loop") and _backing(name) == str(image):
            return f"/dev/{name}"
    return None


def wait_until_detached(image: Path, code: str) -> None:
    """
    The kernel unmounts an image some time after the last process of its instance has ended. A
    second mount before that would damage it. Raises `TemporaryError` with the code.
    """
    deadline = time.monotonic() + DETACH_TIMEOUT
    while loop_device_of(image) is not None:
        if time.monotonic() > deadline:
            raise TemporaryError(f"Image {image} is still mounted.", code=code)
        time.sleep(0.002)


def _backing(device: str) -> str | None:
    try:
        with open(f"{LOOPS}/{device}/loop/backing_file") as file:
            return file.read().strip()
    except OSError as error:
        # The image was detached meanwhile.
        if error.errno not in (errno.ENOENT, errno.ENODEV):
            raise
        return None


def mount_program(*arguments: object, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run `mount_syscalls` as a program."""
    return subprocess.run(
        [sys.executable, "-I", "-S", mount_syscalls.__file__, *map(str, arguments)],
        capture_output=True, text=True, timeout=timeout, check=False, cwd="/",
    )  # fmt: skip


def images_problem(directory: Path) -> str | None:
    """
    Why this directory cannot have file system images; None if it can. Determined by making and
    mounting a small one, once for each file system.
    """
    if os.geteuid() != 0:
        return "only root can mount them"
    for program in (MKFS, E2FSCK):
        if not Path(program).exists():
            return f"{program} does not exist"
    while not directory.is_dir():
        directory = directory.parent
    device = directory.stat().st_dev
    if device not in _image_troubles:
        _image_troubles[device] = _try_image(directory)
    return _image_troubles[device]


_image_troubles: dict[int, str | None] = {}


def _try_image(directory: Path) -> str | None:
    try:
        with tempfile.TemporaryDirectory(prefix=".try-", dir=directory) as temporary:
            image, target = Path(temporary, "image"), Path(temporary, "target")
            target.mkdir()
            make_file_system(image, MIN_IMAGE)
            done = mount_program(mount_syscalls.TRY_IMAGE, image, target, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return done.stderr.strip()[-500:] or "it failed" if done.returncode else None
