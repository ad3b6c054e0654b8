"""Memory that the kernel holds, measured on processes of the test."""

from __future__ import annotations

import mmap
import os
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from atoll.executor.runs import kernel_memory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MiB = 1024 * 1024


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def memory_file(held: ExitStack, size: int) -> int:
    fd = os.memfd_create("test")
    held.callback(os.close, fd)
    os.posix_fallocate(fd, 0, size)
    return fd


def test_a_shared_memory_file_is_counted_once(held: ExitStack) -> None:
    before = kernel_memory.Descriptors("/nowhere")
    before.add(os.getpid())
    fd = memory_file(held, 8 * MiB)
    held.callback(os.close, os.dup(fd))
    found = kernel_memory.Descriptors("/nowhere")
    for _ in range(2):
        found.add(os.getpid())
    assert found.memory - before.memory == 8 * MiB


def test_buffers_in_pipes_are_counted(held: ExitStack) -> None:
    before = kernel_memory.Descriptors("/nowhere")
    before.add(os.getpid())
    for fd in (fd for _ in range(10) for fd in os.pipe()):
        held.callback(os.close, fd)
    found = kernel_memory.Descriptors("/nowhere")
    found.add(os.getpid())
    assert found.memory - before.memory == 10 * kernel_memory.PIPE_MEMORY


def test_mapped_shared_memory_is_counted_unless_its_file_is(held: ExitStack) -> None:
    before = kernel_memory.Mappings([], []).shared(os.getpid(), 1 << 40)
    fd = memory_file(held, 4 * MiB)
    mapped = held.enter_context(mmap.mmap(fd, 4 * MiB))
    shared = held.enter_context(mmap.mmap(-1, 2 * MiB))
    for area in (mapped, shared):
        area[:] = bytes(len(area))
    files = kernel_memory.Descriptors("/nowhere")
    files.add(os.getpid())
    pid = os.getpid()
    assert kernel_memory.Mappings([], []).shared(pid, 1 << 40) - before == 6 * MiB
    assert kernel_memory.Mappings(files.files, []).shared(pid, 1 << 40) - before == 2 * MiB
    assert kernel_memory.Mappings([], []).shared(pid, MiB) == MiB


@pytest.mark.parametrize("kind", ["descriptors", "sockets"])
def test_the_duration_of_a_measurement_is_bounded(
    held: ExitStack, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(kernel_memory, "MAX_DESCRIPTORS", 5)
    monkeypatch.setattr(kernel_memory, "MAX_SOCKETS", 5)
    for _ in range(10):
        for one in socket.socketpair():
            held.enter_context(one)
    look = {
        "descriptors": lambda: kernel_memory.Descriptors("/nowhere").add(os.getpid()),
        "sockets": kernel_memory.unix_sockets,
    }[kind]
    with pytest.raises(kernel_memory.TooMany):
        look()


def test_unnamed_files_are_counted_once_and_by_their_blocks(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as first, (tmp_path / "file").open("rb"):
        first.write(bytes(1 << 20))
        first.flush()
        os.fsync(first.fileno())
        named = kernel_memory.Descriptors(str(tmp_path))
        named.add(os.getpid())
        (tmp_path / "file").unlink()
        found = kernel_memory.Descriptors(str(tmp_path))
        found.add(os.getpid())
        elsewhere = kernel_memory.Descriptors(str(tmp_path / "deeper"))
        elsewhere.add(os.getpid())
    assert (named.disk, elsewhere.disk) == (0, 0)
    assert 1 << 20 <= found.disk < 2 << 20
