"""
Instances that are forks of the fork server: as confined as those that bubblewrap starts, and no way
from one to another.
"""

from __future__ import annotations

import fcntl
import fnmatch
import json
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from atoll.drivers.local import leftovers
from atoll.settings import LocalSettings
from tests import drivers
from tests.e2e.hostile.conftest import SECRET, attackable
from tests.e2e.hostile.host import eventually, fork_server
from tests.host_processes import living

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.hostile.conftest import Target
    from tests.e2e.hostile.host import Box

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or drivers.CHOSEN != "local",
    reason="only root's instances of the local driver are forks",
)


@pytest.fixture(scope="module")
def forks(targets: Callable[[str], Target]) -> Target:
    return targets("root")


@pytest.fixture(scope="module")
def bubblewrapped(bubblewrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """The same server, with instances that bubblewrap starts."""
    home = tmp_path_factory.mktemp("bubblewrapped")
    with attackable("root", home, ATOLL_LOCAL__FORK_SERVER="false") as target:
        yield target


@pytest.fixture(scope="module")
def one(forks: Target) -> Iterator[Box]:
    box = forks.box()
    assert is_fork(box)
    yield box
    forks.client.delete(box.url)


@pytest.fixture(scope="module")
def other(forks: Target) -> Iterator[Box]:
    box = forks.box()
    assert is_fork(box)
    yield box
    forks.client.delete(box.url)


@pytest.fixture(scope="module")
def plain(bubblewrapped: Target) -> Iterator[Box]:
    box = bubblewrapped.box()
    assert not is_fork(box)
    yield box
    bubblewrapped.client.delete(box.url)


def is_fork(box: Box) -> bool:
    return b"fork_server" in Path(f"/proc/{box.pid_1}/cmdline").read_bytes()


# Out of reach

REACH = """
import os, signal, socket, sys
fork_server, found = int(sys.argv[1]), []
def attempt(what, call):
    try:
        found.append((what, str(call())))
    except OSError:
        pass
for number in (0, signal.SIGSTOP, signal.SIGKILL):
    attempt("kill", lambda: os.kill(fork_server, number))
    attempt("killpg", lambda: os.killpg(fork_server, number))
attempt("pidfd", lambda: os.pidfd_open(fork_server))
attempt("proc", lambda: os.listdir(f"/proc/{fork_server}"))
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        continue
    for name in names:
        path = f"/proc/{pid}/fd/{name}"
        if os.path.lexists(path) and os.readlink(path).startswith("socket:"):
            found.append(("socket", path))
for line in open("/proc/net/unix").read().splitlines()[1:]:
    if (name := line.split()[7:]) and name != ["@atoll"]:
        found.append(("named socket", name))
print(found)
"""


@pytest.mark.quick
def test_code_cannot_reach_the_fork_server(forks: Target, one: Box) -> None:
    pid = fork_server(forks.pid)
    assert one.printed(REACH, args=[str(pid)]) == "[]"
    socket = os.readlink(f"/proc/{pid}/fd/3")
    assert socket.startswith("socket:")
    for inside in one.processes() | {one.pid_1}:
        entries = Path(f"/proc/{inside}/fd").iterdir()
        assert socket not in {os.readlink(entry) for entry in entries if os.path.lexists(entry)}
        for kind in ("pid", "mnt", "user", "net", "ipc", "uts", "cgroup"):
            own, its = (os.readlink(f"/proc/{p}/ns/{kind}") for p in (inside, pid))
            assert own != its, kind


def test_a_signal_to_every_process_does_not_reach_the_fork_server(forks: Target) -> None:
    pid = fork_server(forks.pid)
    box = forks.box()
    try:
        box.run("import os, signal\nos.kill(-1, signal.SIGKILL)")
        box.run("import os, signal\nos.kill(-1, signal.SIGSTOP)", timeout=2)
        assert fork_server(forks.pid) == pid
        assert pid in living()
        box.assert_usable()
    finally:
        forks.client.delete(box.url)


IMPOSTORS = """
import ctypes, os, time
ctypes.CDLL(None).prctl(15, b"bwrap", 0, 0, 0)
for _ in range(20):
    if os.fork() == 0:
        break
else:
    open("named", "w").close()
time.sleep(600)
"""


def test_processes_named_bwrap_are_not_counted_as_instances(forks: Target) -> None:
    """The environment of a fork's processes has the mark of the data directory."""
    box = forks.box()
    execution = box.submit(IMPOSTORS, timeout=600)
    eventually(lambda: box.client.get(f"{box.files}/named").is_success, "all processes")
    node = forks.server.data_dir / "node"
    assert leftovers.count(LocalSettings(), node) == len(list((node / "instances").iterdir()))
    box.client.post(f"/api/v1/executions/{execution}/cancel")
    forks.client.delete(box.url)


WRITE = """
import ctypes, json, mmap, os, sys
libc = ctypes.CDLL(None, use_errno=True)
paths = {"/proc/self/exe", sys.executable, os.path.realpath(sys.executable)}
for line in open("/proc/self/maps"):
    fields = line.split(None, 5)
    if len(fields) == 6 and fields[5].startswith("/"):
        paths |= {fields[5].strip(), "/proc/self/map_files/" + fields[0]}
assert len(paths) > 5
written = []
def attempt(what, path, call):
    try:
        if call() not in (None, 0):
            return
    except (OSError, ValueError):
        return
    written.append((what, path))
for path in sorted(paths):
    for flags in (os.O_RDWR, os.O_WRONLY, os.O_WRONLY | os.O_APPEND, os.O_WRONLY | os.O_TRUNC):
        attempt(flags, path, lambda: os.close(os.open(path, flags)))
    attempt("truncate", path, lambda: os.truncate(path, 0))
    attempt("chmod", path, lambda: os.chmod(path, 0o777))
    attempt("chown", path, lambda: os.chown(path, 1000, 1000))
    attempt("utime", path, lambda: os.utime(path))
    attempt("unlink", path, lambda: os.unlink(path))
    attempt("rename", path, lambda: os.rename(path, path + "x"))
    attempt("xattr", path, lambda: os.setxattr(path, "user.x", b"x"))
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        continue
    attempt("mmap", path, lambda: mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_WRITE) and None)
    attempt("reopen", path, lambda: os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR)))
    attempt("fchmod", path, lambda: os.fchmod(fd, 0o777))
    attempt("fallocate", path, lambda: libc.fallocate(fd, 0, 0, ctypes.c_long(4096)))
    os.close(fd)
print(json.dumps(written))
"""


@pytest.mark.quick
def test_no_file_of_the_interpreter_can_be_written(shared: Box) -> None:
    assert json.loads(shared.printed(WRITE)) == []


def test_mapped_files_are_on_read_only_mounts(one: Box) -> None:
    """Even the privileges of root would not allow writing through /proc/self/map_files."""
    directory = Path(f"/proc/{one.pid_1}/map_files")
    mapped = [path for path in directory.iterdir() if ".so" in os.readlink(path)]
    assert mapped
    for path in mapped:
        with pytest.raises(OSError, match="Read-only file system"):
            os.close(os.open(path, os.O_RDWR))


def test_instances_of_an_ordinary_user_are_no_forks(targets: Callable[[str], Target]) -> None:
    target = targets("unprivileged")
    box = target.box()
    assert not is_fork(box)
    target.client.delete(box.url)


# Side by side

PROBE = """
import ctypes, json, os, resource, signal, socket, stat, sys
found = {}
def text(path):
    try:
        with open(path, errors="replace") as file:
            return file.read().strip()
    except OSError as error:
        return error.strerror
def put(kind, values):
    for name, value in values.items():
        found[f"{kind} {name}"] = value
put("status", dict(line.split(":\\t", 1) for line in text("/proc/self/status").splitlines()))
limits = text("/proc/self/limits").splitlines()
put("limit", {line[:26].strip(): line[26:].split() for line in limits})
put("variable", dict(os.environ))
words = text("/proc/self/environ").strip("\\0").split("\\0")
put("initial variable", dict(word.split("=", 1) for word in words))
for line in text("/proc/self/mountinfo").splitlines():
    before, after = (part.split() for part in line.split(" - "))
    place = before[4]
    put("mount", {f"{place}: {name}": value for name, value in {
        "root": before[3], "options": before[5], "propagation": before[6:], "kind": after[0],
        "super options": sorted(after[2].split(","))}.items()})
for name in os.listdir("/proc/self/fd"):
    if os.path.lexists(f"/proc/self/fd/{name}"):
        flags = text(f"/proc/self/fdinfo/{name}").split("flags:")[1].split()[0]
        found[f"descriptor {name}"] = [os.readlink(f"/proc/self/fd/{name}"), flags]
put("disposition", {s.name: str(signal.getsignal(s)).split(" at ")[0] for s in signal.Signals})
put("file", {name: text("/proc/self/" + name) for name in (
    "uid_map", "gid_map", "setgroups", "projid_map", "cgroup", "oom_score_adj", "timerslack_ns",
    "loginuid", "sessionid", "attr/current", "coredump_filter", "personality", "timens_offsets",
    "comm", "cmdline", "net/dev_mcast", "net/route", "net/if_inet6", "net/fib_trie",
    "/proc/sys/kernel/domainname", "/proc/sys/kernel/hostname")})
put("link", {name: os.readlink("/proc/self/" + name) for name in ("exe", "root", "cwd")})
libc, number = ctypes.CDLL(None), ctypes.c_int()
for option in (3, 7, 13, 21, 27, 34, 39, 42, 66):
    found[f"prctl {option}"] = libc.prctl(option, 0, 0, 0, 0)
for option in (2, 37):
    found[f"prctl {option}"] = [libc.prctl(option, ctypes.byref(number)), number.value]
put("id", {"users": os.getresuid(), "groups": os.getresgid(), "supplementary": os.getgroups(),
    "own session": os.getsid(0) == os.getpid() == os.getpgrp(), "pid": os.getpid() > 2,
    "priority": os.getpriority(os.PRIO_PROCESS, 0), "policy": os.sched_getscheduler(0),
    "processors": sorted(os.sched_getaffinity(0)), "interfaces": socket.if_nameindex()})
def describe(path):
    info = os.lstat(path)
    link = os.readlink(path) if stat.S_ISLNK(info.st_mode) else ""
    found[f"mode {path}"] = oct(info.st_mode)
    found[f"entry {path}"] = [info.st_uid, info.st_gid, info.st_rdev, link]
for top in ("/", "/dev", "/dev/pts", "/dev/shm", "/etc", "/opt", "/opt/atoll", "/proc", "/root",
            "/run", "/run/atoll", "/tmp", "/var", "/workspace"):
    try:
        describe(top)
        for name in os.listdir(top):
            if not name.isdigit():
                describe(os.path.join(top, name))
    except OSError as error:
        found[f"entry {top}"] = error.strerror
for path in ("/", "/dev", "/dev/shm", "/tmp", "/workspace"):
    size = os.statvfs(path)
    found[f"size {path}"] = [size.f_blocks * size.f_frsize, size.f_flag]
    found[f"inodes {path}"] = size.f_files
put("python", {name: repr(getattr(sys, name)) for name in (
    "argv", "orig_argv", "path", "flags", "executable", "prefix", "base_prefix",
    "warnoptions", "_xoptions", "dont_write_bytecode")})
put("module", dict.fromkeys(sys.modules, True))
put("searched", dict.fromkeys(sys.path_importer_cache, True))
maps = [line.split(None, 5) for line in text("/proc/self/maps").splitlines()]
put("mapped", {fields[5]: True for fields in maps if len(fields) == 6})
print(json.dumps(found))
"""

DIFFERENCES = {
    "file cmdline": "bubblewrap's has the executor's configuration; a fork has the fork server's",
    "python orig_argv": "the same",
    "initial variable ATOLL_OWNER": "a hash of the data directory's path, which mountinfo shows",
    "module atoll_executor.executor.fork_server": "only forks need it",
    "module atoll_executor.executor.privileges": "only forks need it",
    "module fcntl": "privileges.py needs it",
    "mapped */fcntl.*.so": "the same",
    "mode /*": "bubblewrap makes parents of mount points 0700, in a sandbox with one user",
    "mount /: root": "bubblewrap's root is a directory of its tmpfs",
    "mount /: super options": "the same",
    "mount /proc/sys: *": "bubblewrap leaves out what a sandbox's user cannot write anyway",
    "mount /proc/irq: *": "the same",
    "mount /proc/bus: *": "the same",
    "mount /proc/sysrq-trigger: *": "the same",
    "mount /*: super options": "bubblewrap cannot limit the inodes of a tmpfs",
    "inodes /tmp": "the same",
    "inodes /dev/shm": "the same",
    "first process: variable ATOLL_OWNER": "see above",
    "first process: argument": "see above",
}
"""Between a fork and an instance that bubblewrap starts, with the reason."""
VOLATILE = re.compile(
    r"(first process: )?status (Vm|Rss|.*ctxt_switches|State|Tgid|Pid|PPid|NS)"
    r"|first process: status FDSize|entry /proc/(thread-)?self$"
)
USER_NAMESPACE, PARENT_NAMESPACE = 0xB701, 0xB702


def described(box: Box) -> dict[str, Any]:
    """A session inside and outside, without what every session has of its own."""
    found: dict[str, Any] = json.loads(box.printed(PROBE)) | first_process(box.pid_1)
    own = {
        str(box.server.data_dir): "DATA",
        box.id: "SESSION",
        box.instance: "INSTANCE",
        found["first process: status Uid"].split()[0]: "UID",
    }
    text = json.dumps({k: v for k, v in found.items() if not VOLATILE.match(k)})
    for value, name in own.items():
        text = text.replace(value, name)
    text = re.sub(r"(exec|inv)_\d{8}_[0-9a-f]+", r"\1", text)
    text = re.sub(r"(pipe|socket|anon_inode|memfd)(:\S*?)?\[?\d+\]?", r"\1", text)
    result: dict[str, Any] = json.loads(text)
    return result


def first_process(pid: int) -> dict[str, Any]:
    """PID 1, as the host sees it."""
    place = Path(f"/proc/{pid}")
    lines = (place / "status").read_text().splitlines()
    found: dict[str, Any] = {f"status {k}": v for k, v in (line.split(":\t", 1) for line in lines)}
    found |= {
        f"limit {line[:26]}": line[26:] for line in (place / "limits").read_text().splitlines()
    }
    words = (place / "environ").read_text().strip("\0").split("\0")
    found |= {f"variable {k}": v for k, v in (word.split("=", 1) for word in words)}
    found["argument"] = (place / "cmdline").read_text()
    for name in ("oom_score_adj", "uid_map", "gid_map", "setgroups", "coredump_filter"):
        found[name] = (place / name).read_text()
    for entry in (place / "fd").iterdir():
        if int(entry.name) <= 8:
            # The null device of the host is seen with or without the mount that it is on.
            found[f"descriptor {entry.name}"] = os.readlink(entry).replace("/dev/null", "/null")
    found |= {f"namespace {kind}": value for kind, value in namespaces(pid).items()}
    return {f"first process: {name}": value for name, value in found.items()}


def namespaces(pid: int) -> dict[str, str]:
    """Which user namespace owns each namespace of a process: its own, or one above."""
    levels = [os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)]
    while inode(levels[-1]) != os.stat("/proc/self/ns/user").st_ino:
        levels.append(fcntl.ioctl(levels[-1], PARENT_NAMESPACE))
    places = [inode(fd) for fd in levels]
    found = {"levels": str(len(levels))}
    for kind in ("mnt", "pid", "net", "ipc", "uts", "cgroup", "time"):
        fd = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
        owner = fcntl.ioctl(fd, USER_NAMESPACE)
        new = inode(fd) != os.stat(f"/proc/self/ns/{kind}").st_ino
        found[kind] = f"{'new' if new else 'of the host'}, owned by {places.index(inode(owner))}"
        os.close(owner)
        os.close(fd)
    for fd in levels:
        os.close(fd)
    return found


def inode(fd: int) -> int:
    return os.fstat(fd).st_ino


@pytest.mark.quick
def test_a_fork_is_confined_as_an_instance_that_bubblewrap_starts(one: Box, plain: Box) -> None:
    fork, reference = described(one), described(plain)
    different = {
        name: (fork.get(name, "missing"), reference.get(name, "missing"))
        for name in fork.keys() | reference.keys()
        if fork.get(name) != reference.get(name)
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in DIFFERENCES)
    }
    assert different == {}
    modes = {k: int(v, 8) for k, v in reference.items() if k.startswith("mode ")}
    assert {k: int(fork[k], 8) & ~0o55 for k in modes} == {k: v & ~0o55 for k, v in modes.items()}
    for part in ("sys", "irq", "bus"):
        assert "ro" in fork.get(f"mount /proc/{part}: options", "ro").split(",")


def test_programs_of_a_fork_are_confined_as_well(one: Box, plain: Box) -> None:
    code = "cat /proc/self/status /proc/self/limits; umask; env | cut -d= -f1 | sort"
    volatile = re.compile(r"Vm|Rss|.*ctxt_switches|Tgid|Pid|PPid|NS")
    fork, reference = (
        [
            line
            for line in box.printed(code, language="shell").splitlines()
            if not volatile.match(line)
        ]
        for box in (one, plain)
    )
    assert fork == reference


# Nothing is shared

RANDOM = """
import json, os, random, secrets, tempfile, uuid
found = [os.urandom(8).hex(), random.random(), secrets.token_hex(8), str(uuid.uuid4()),
         str(uuid.uuid1()), next(tempfile._get_candidate_names()), random.SystemRandom().random()]
try:
    import numpy
    found.append(float(numpy.random.random()))
except ImportError:
    pass
try:
    import ssl
    found.append(ssl.RAND_bytes(8).hex())
except ImportError:
    pass
print(json.dumps(found))
"""


def test_random_numbers_differ(forks: Target, one: Box, other: Box) -> None:
    drawn = [json.loads(box.printed(RANDOM)) for box in (one, other, one, other)]
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == 4, numbers


LAYOUT = "print(hash('text'), id(None), id(type))"


def test_only_forks_share_layout_and_hash_seed(one: Box, other: Box, bubblewrapped: Target) -> None:
    """The price of forks, which `local.fork_server` avoids."""
    assert one.printed(LAYOUT) == other.printed(LAYOUT)
    apart = [bubblewrapped.box() for _ in range(2)]
    first, second = (box.printed(LAYOUT).split() for box in apart)
    assert first[0] != second[0]
    assert first[1:] != second[1:]
    for box in apart:
        bubblewrapped.client.delete(box.url)


CHANGE = """
import ctypes, json, sys
text = json.__doc__
place = id(text) + sys.getsizeof(text) - len(text) - 1
function = ctypes.cast(ctypes.CDLL(None).getppid, ctypes.c_void_p).value
with open("/proc/self/mem", "r+b", buffering=0) as memory:
    for address, data in ((place, b"changed"), (function, b"\\xcc" * 4)):
        memory.seek(address)
        memory.write(data)
print(text[:7], ctypes.string_at(function, 4) == b"\\xcc" * 4)
"""


def test_memory_that_one_session_changes_stays_the_same_in_others(
    forks: Target, one: Box, other: Box
) -> None:
    """Of the fork server and of a file."""
    assert one.printed(CHANGE) == "changed True"
    late = forks.box()
    for box in (one, other, late):
        code = "import json, os; print(json.__doc__[:4], os.getppid() > 0)"
        assert box.printed(code) == "JSON True"
    forks.client.delete(late.url)


SCAN = """
import json, re, sys
KEY = 0x5A
table = bytes(number ^ KEY for number in range(256))
# As they are, they would be found where this program has them.
hidden = [bytes.fromhex(word) for word in sys.argv[1:]]
found, seen = set(), 0
memory = open("/proc/self/mem", "rb", buffering=0)
for line in open("/proc/self/maps"):
    begin, end, access = re.match("([0-9a-f]+)-([0-9a-f]+) (....)", line).groups()
    if access[0] != "r" or "[v" in line:
        continue
    try:
        memory.seek(int(begin, 16))
        part = memory.read(int(end, 16) - int(begin, 16)).translate(table)
    except (OSError, ValueError, OverflowError):
        continue
    seen += len(part)
    found |= {number for number, word in enumerate(hidden) if word in part}
    del part
print(json.dumps([seen, sorted(found)]))
"""


def hidden(text: str) -> str:
    return bytes(byte ^ 0x5A for byte in text.encode()).hex()


def in_memory(pid: int, words: list[str]) -> list[str]:
    """Those of the words that are in the memory of a process."""
    found = set()
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            place, access = line.split()[:2]
            if access[0] == "r" and "[v" not in line:
                begin, end = (int(part, 16) for part in place.split("-"))
                memory.seek(begin)
                part = memory.read(end - begin)
                found |= {word for word in words if word.encode() in part}
    return sorted(found)


def test_no_data_of_the_server_or_of_another_session_is_in_memory(forks: Target, one: Box) -> None:
    text = secrets.token_hex(16)
    run = {"env": {"TEXT": text}, "args": [text], "stdin": text}
    one.printed(f"text = '{text}'\nopen('/tmp/text', 'w').write(text)", **run)
    words = [forks.server.key, SECRET, str(forks.server.data_dir), text, one.id, one.instance]
    late = forks.box()
    try:
        assert is_fork(late)
        present = secrets.token_hex(16)
        seen, found = json.loads(
            late.printed(
                f"present = '{present}'\n{SCAN}", args=[hidden(w) for w in [*words, present]]
            )
        )
        assert seen > 5 << 20
        assert found == [len(words)], "only its own text is found"
        for pid in (fork_server(forks.pid), late.pid_1, *late.settled()):
            assert in_memory(pid, words) == [], pid
        assert in_memory(one.pid_1, [one.instance, "atoll"]) != []
    finally:
        forks.client.delete(late.url)


def test_the_fork_server_has_only_the_files_of_an_instance(forks: Target, one: Box) -> None:
    """What it reads before it forks, such as a module path, is in every instance."""
    pid = fork_server(forks.pid)
    mounts = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    inside = Path(f"/proc/{one.pid_1}/mountinfo").read_text().splitlines()
    assert {line.split()[4] for line in mounts} <= {line.split()[4] for line in inside}
    assert all("ro" in line.split()[5].split(",") for line in mounts)
    assert not os.path.lexists(f"/proc/{pid}/root{forks.server.data_dir}")
    descriptors = {entry.name for entry in Path(f"/proc/{pid}/fd").iterdir()}
    assert descriptors == {"0", "1", "2", "3"}
