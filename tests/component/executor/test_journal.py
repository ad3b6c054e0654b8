"""The journal of the executor: complete records are read, whatever their surroundings."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.executor.runs import journal
from atoll.executor.runs.journal import Journal
from atoll.protocol import frames

Ended = tuple[str, dict[str, Any], list[tuple[int, int, bytes]]]

CHANNELS = [frames.STDOUT, frames.STDERR, frames.VALUE, frames.APPROVAL, frames.DISPLAY]
numbers = st.none() | st.booleans() | st.integers(-(2**62), 2**62)
results = st.dictionaries(
    st.text(max_size=8),
    numbers | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    max_size=5,
)
logs = st.lists(st.tuples(st.sampled_from(CHANNELS), st.binary(max_size=200)), max_size=6).map(
    lambda entries: [(n + 1, channel, data) for n, (channel, data) in enumerate(entries)]
)
runs = st.lists(
    st.tuples(st.text(min_size=1, max_size=12), results, logs),
    max_size=8,
    unique_by=lambda run: run[0],
)


@contextmanager
def opened(directory: Path) -> Iterator[list[int]]:
    fds = [
        os.open(directory / f"journal.{number}", os.O_RDWR | os.O_CREAT, 0o600) for number in (0, 1)
    ]
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


@contextmanager
def memory(*contents: bytes) -> Iterator[list[int]]:
    """Two files with these contents."""
    fds = [os.memfd_create("journal") for _ in range(2)]
    try:
        for fd, data in zip(fds, contents, strict=False):
            os.write(fd, data)
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def written(ended: list[Ended]) -> bytes:
    with memory() as fds:
        kept = Journal(fds)
        for run in ended:
            kept.append(*run)
        return os.pread(fds[0], 1 << 24, 0)


def loaded(*contents: bytes) -> list[Ended]:
    with memory(*contents) as fds:
        return Journal(fds).load()


@given(runs)
def test_written_records_are_read_unchanged(ended: list[Ended]) -> None:
    assert loaded(written(ended)) == ended


@given(runs, st.integers(0))
def test_a_journal_cut_anywhere_gives_the_records_before_the_cut(
    ended: list[Ended], cut: int
) -> None:
    whole = written(ended)
    found = loaded(whole[: cut % (len(whole) + 1)])
    assert found == ended[: len(found)]


@given(runs, st.lists(st.tuples(st.integers(0), st.integers(1, 255)), min_size=1, max_size=4))
def test_a_damaged_journal_yields_a_prefix_of_complete_records(
    ended: list[Ended], flips: list[tuple[int, int]]
) -> None:
    data = bytearray(written(ended))
    for place, bits in flips:
        if data:
            data[place % len(data)] ^= bits
    found = loaded(bytes(data))
    assert found == ended[: len(found)]


@given(st.binary(max_size=4096), st.binary(max_size=4096))
def test_garbage_is_an_empty_journal_that_can_be_written(first: bytes, second: bytes) -> None:
    with memory(first, second) as fds:
        kept = Journal(fds)
        assert kept.load() == []
        kept.append("one", {"exit_code": 0}, [])
        assert Journal(fds).load() == [("one", {"exit_code": 0}, [])]


@given(runs, st.integers(0), runs)
def test_records_after_a_truncated_one_are_found(
    before: list[Ended], cut: int, after: list[Ended]
) -> None:
    whole = written(before)
    with memory(whole[: cut % (len(whole) + 1)]) as fds:
        kept = Journal(fds)
        found = {run[0]: run for run in kept.load()}
        for run in after:
            kept.append(*run)
            found[run[0]] = run
        again = {run[0]: run for run in Journal(fds).load()}
        assert again == found


def test_a_forged_record_ends_the_reading() -> None:
    forged = [b"", b"\0\0\0\5[1,2]", b"\0\0\0\2{}", b"\xff\xff\xff\xffx", b"\0\0\0\4nope"]
    for body in forged:
        record = journal.RECORD.pack(len(body), journal.checksum(body)) + body
        assert loaded(written([("a", {}, [])]) + record) == [("a", {}, [])]
    endless = journal.RECORD.pack(0xFFFF_FFFF, b"")
    assert loaded(written([("a", {}, [])]) + endless) == [("a", {}, [])]


def test_without_files_nothing_is_stored() -> None:
    kept = Journal()
    kept.append("one", {}, [])
    kept.drop("one")
    assert kept.load() == []


def test_a_large_file_without_pending_records_is_emptied(tmp_path: Path) -> None:
    with opened(tmp_path) as fds:
        kept = Journal(fds)
        kept.load()
        most = 0
        for number in range(200):
            kept.append(str(number), {}, [(1, frames.STDOUT, b"x" * 10_000)])
            kept.drop(str(number))
            most = max(most, os.fstat(fds[0]).st_size)
        assert 10_000 < most < journal.EMPTY_ABOVE + 20_000
        kept.append("last", {}, [])
        found = [run[0] for run in Journal(fds).load()]
        # Records after the last truncation are read again, because their acknowledgement is not
        # stored.
        assert found[-1] == "last"


def test_a_large_file_is_compacted_without_acknowledged_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "COMPACT_ABOVE", 100_000)
    with opened(tmp_path) as fds:
        kept = Journal(fds)
        kept.load()
        kept.append("waits", {"exit_code": 3}, [(1, frames.VALUE, b"Vnull")])
        for number in range(1000):
            kept.append(str(number), {}, [(1, frames.STDOUT, b"x" * 1000)])
            kept.drop(str(number))
            assert sum(os.fstat(fd).st_size for fd in fds) < 110_000
        assert Journal(fds).load()[0] == ("waits", {"exit_code": 3}, [(1, 3, b"Vnull")])


def test_an_interrupted_compaction_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "COMPACT_ABOVE", 5_000)
    taken: list[Ended] = [("b", {}, [(1, 1, b"x" * 4000)])]
    before = written([("a", {"n": 1}, []), *taken])
    with memory(before) as fds:
        kept = Journal(fds)
        kept.load()
        kept.drop("b")
        kept.append("c", {}, [(1, 1, b"y" * 1000)])
        after = os.pread(fds[1], 1 << 20, 0)
    assert [run[0] for run in loaded(b"", after)] == ["a", "c"]
    # The process died before the other file had its header, or before the first was emptied.
    torn = bytes(journal.HEADER.size) + after[journal.HEADER.size :]
    assert [run[0] for run in loaded(before, torn)] == ["a", "b"]
    assert [run[0] for run in loaded(before, after)] == ["a", "c"]


def test_records_beyond_the_file_limit_stay_in_memory(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(journal, "JOURNAL_FILE_SIZE", 10_000)
    with memory() as fds:
        kept = Journal(fds)
        for number in range(20):
            kept.append(str(number), {}, [(1, 1, b"x" * 1000)])
        assert os.fstat(fds[0]).st_size <= 10_000
        assert [run[0] for run in Journal(fds).load()] == [str(n) for n in range(9)]
    assert capfd.readouterr().err.count("only in memory") == 1


def test_a_write_error_is_logged_once_and_raises_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fds = [os.open(tmp_path / str(n), os.O_RDONLY | os.O_CREAT) for n in (0, 1)]
    kept = Journal(fds)
    kept.load()
    for name in "ab":
        kept.append(name, {}, [])
        kept.drop(name)
    assert capfd.readouterr().err.count("only in memory") == 1
    for fd in fds:
        os.close(fd)


FULL = """
import os, signal, sys
from atoll.executor.runs.journal import Journal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
fds = [os.open(path, os.O_RDWR | os.O_CREAT) for path in sys.argv[1:]]
kept = Journal(fds)
kept.load()
for name, size in (("a", 1000), ("large", 20_000), ("b", 1000)):
    kept.append(name, {}, [(1, 1, b"x" * size)])
print([run[0] for run in Journal(fds).load()])
"""


def test_a_record_truncated_by_a_full_disk_does_not_damage_the_next(tmp_path: Path) -> None:
    # The limit on the size of a file stands for a full disk: the write is short in the same way.
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "0"), str(tmp_path / "1")],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.stdout.strip() == "['a', 'b']"
    assert done.stderr.count("only in memory") == 1
