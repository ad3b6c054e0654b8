"""
Checkpoints of many small files, and sessions that begin with them.

Beside what copies a tree on this machine: tar, `cp -a` and `rsync -a`; and a tar that is put to the
same S3 server in one piece. None of these checks what it reads or knows what is on S3 already.
"""

from __future__ import annotations

import shutil
import subprocess
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from tests.servers.s3 import S3Server

from bench.__main__ import create, delete, run, wait_for_pool
from bench.report import Way, nothing
from bench.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.report import Report

# Contents that do not compress, in a hundred directories, the same sizes each time.
FILES = """
import os
for number in range({count}):
    os.makedirs(f"{place}/{{number % 100:02d}}", exist_ok=True)
    with open(f"{place}/{{number % 100:02d}}/{{number:06d}}", "wb") as file:
        file.write(os.urandom(1024 + number * 7919 % 4096))
"""
ONE = "00/000000"
RSYNC = shutil.which("rsync") is not None
# Nothing is saved but what is asked for.
ENVIRONMENT = {
    "ATOLL_POOL__SIZE": "2",
    "ATOLL_WORKSPACE__DELAY": "86400",
    "ATOLL_WORKSPACE__INTERVAL": "86400",
}


class Place:
    """Where a session is made and saved: a server and its blob store."""

    def __init__(self, name: str, server: Server, files: int) -> None:
        self.name = name
        self._client = server.client()
        self._files = files
        self._session = ""
        self._begun = ""

    def fill(self) -> None:
        """A new session with files that nothing was saved of."""
        if self._session:
            self.end()
        self._session = create(self._client)
        run(self._client, self._session, FILES.format(count=self._files, place="tree"))

    def change(self) -> None:
        run(self._client, self._session, f"open('tree/{ONE}', 'ab').write(b'more')")

    def save(self) -> None:
        self._client.call("POST", f"/api/v1/sessions/{self._session}/checkpoint")

    def end(self) -> None:
        delete(self._client, self._session)

    def forget(self) -> None:
        if self._begun:
            delete(self._client, self._begun)
        wait_for_pool(self._client, "python", int(ENVIRONMENT["ATOLL_POOL__SIZE"]))

    def begin(self) -> None:
        self._begun = create(self._client, started_from=self._session)

    def check(self) -> None:
        """What is fast has to be right as well."""
        count = "sum(len(files) for _, _, files in os.walk('tree'))"
        run(self._client, self._begun, f"import os\nassert {count} == {self._files}")


class Copies:
    """The same tree, copied by what is there on any machine."""

    def __init__(self, tree: Path, s3: S3Server) -> None:
        self._tree = tree
        self._tar = tree.with_name("tree.tar")
        self._copy = tree.with_name("tree.copy")
        self._synced = tree.with_name("tree.synced")
        self._new = tree.with_name("tree.new")
        self._s3 = s3.store()

    def taken(self) -> list[Way]:
        """All of it, whatever there was before."""
        return [
            Way("tar to a file", self._pack, partial(self._tar.unlink, missing_ok=True)),
            Way(
                "cp -a",
                partial(_command, "cp", "-a", self._tree, self._copy),
                self._gone(self._copy),
            ),
            Way("tar, put to the S3 server", self._put),
        ]

    def first(self) -> list[Way]:
        return [*self.taken(), *self._synced_after(self._gone(self._synced))]

    def unchanged(self) -> list[Way]:
        return [*self.taken(), *self._synced_after(nothing)]

    def changed(self) -> list[Way]:
        return [*self.taken(), *self._synced_after(self._change)]

    def _synced_after(self, ready: Callable[[], object]) -> list[Way]:
        return [Way("rsync -a", self._sync, ready)] if RSYNC else []

    def restored(self) -> list[Way]:
        new = self._gone(self._new)
        ways = [
            Way("tar from a file", self._unpack, new),
            Way("cp -a", partial(_command, "cp", "-a", self._copy, self._new), new),
            Way("tar, got from the S3 server", self._get, new),
        ]
        if RSYNC:
            command = ("rsync", "-a", f"{self._synced}/", self._new)
            ways.append(Way("rsync -a", partial(_command, *command), new))
        return ways

    def _pack(self) -> None:
        _command("tar", "--create", "--file", self._tar, "--directory", self._tree, ".")

    def _unpack(self) -> None:
        self._new.mkdir()
        _command("tar", "--extract", "--file", self._tar, "--directory", self._new)

    def _put(self) -> None:
        self._pack()
        self._s3.put("tree.tar", self._tar)

    def _get(self) -> None:
        self._tar.write_bytes(self._s3.get("tree.tar").bytes())
        self._unpack()

    def _sync(self) -> None:
        _command("rsync", "-a", f"{self._tree}/", self._synced)

    def _change(self) -> None:
        with (self._tree / ONE).open("ab") as file:
            file.write(b"more")

    def _gone(self, path: Path) -> Callable[[], None]:
        return partial(shutil.rmtree, path, ignore_errors=True)


def measure(report: Report, place: Path, *, files: int, rounds: int) -> None:
    tree = place / "tree"
    exec(FILES.format(count=files, place=tree), {})
    size = sum(each.stat().st_size for each in tree.rglob("*") if each.is_file())
    with ExitStack() as stack:
        s3 = stack.enter_context(S3Server(place))
        servers = {
            "local blobs": stack.enter_context(Server(**ENVIRONMENT)),
            "S3": stack.enter_context(Server(**ENVIRONMENT, **s3.environment())),
        }
        places = [Place(name, server, files) for name, server in servers.items()]
        copies = Copies(tree, s3)

        def saved(ready: Callable[[Place], object]) -> list[Way]:
            return [
                Way(f"checkpoint, {each.name}", each.save, partial(ready, each), ours=True)
                for each in places
            ]

        report.section(f"first checkpoint of {files} files")
        if not RSYNC:
            report.skip("rsync -a", "rsync is not installed")
        report.turns([*copies.first(), *saved(Place.fill)], rounds, size=size)
        report.section("the same again, nothing changed")
        report.turns([*copies.unchanged(), *saved(lambda _: None)], rounds)
        report.section("the same again, one file changed")
        report.turns([*copies.changed(), *saved(Place.change)], rounds)
        report.section(f"a session that begins with {files} files")
        for each in places:
            each.end()
        begun = [
            Way(f"create started_from, {each.name}", each.begin, each.forget, ours=True)
            for each in places
        ]
        report.turns([*copies.restored(), *begun], rounds, size=size)
        for each in places:
            each.check()


def _command(*command: str | Path) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
