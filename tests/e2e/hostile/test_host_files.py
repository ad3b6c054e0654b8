"""Files of the host, of the server and of other sessions are unreachable."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from atoll.drivers.local import sandbox
from tests import drivers
from tests.rootfs import IMAGE_USER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.hostile.conftest import Target
    from tests.e2e.hostile.host import Box

pytestmark = [pytest.mark.every_driver, pytest.mark.quick]

# Looks for a text in every file that can be opened, from every place that could be a way out.
SEARCH = """
import os, sys
wanted, places = sys.argv[1].encode(), sys.argv[2:]
found, opened = [], 0
for place in places:
    for directory, names, files in os.walk(place):
        skipped = {"usr", "lib", "lib64", "bin", "sbin", ".pyenv", "opt", "task"}
        if directory != "/":
            skipped.add("proc")
        names[:] = [name for name in names if name not in skipped]
        if directory.count("/") > 12:
            names[:] = []
        for name in files:
            path = os.path.join(directory, name)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            except OSError:
                continue
            try:
                opened += 1
                if wanted in os.read(fd, 1 << 20):
                    found.append(path)
            except OSError:
                pass
            finally:
                os.close(fd)
print(found, opened)
"""


@pytest.fixture(scope="module")
def marked(target: Target) -> Iterator[tuple[str, Path]]:
    """A world-readable file of the host with a unique text."""
    text = secrets.token_hex(16)
    path = Path("/var/tmp" if os.access("/var/tmp", os.W_OK) else "/tmp") / f"atoll-{text[:8]}"
    path.write_text(text)
    path.chmod(0o644)
    yield text, path
    path.unlink()


HOST_FILES = [
    "/etc/shadow", "/etc/gshadow", "/etc/sudoers", "/etc/ssh", "/etc/machine-id", "/etc/fstab",
    "/root/.bashrc", "/root/.ssh", "/root/.profile", "/home", "/boot", "/srv", "/mnt", "/media",
    "/sys", "/sys/fs/cgroup", "/sys/kernel", "/var/log", "/var/lib", "/var/run", "/run/docker.sock",
    "/run/systemd", "/lost+found", "/dev/vda", "/dev/sda", "/dev/mem", "/dev/kmem", "/dev/kvm",
    "/dev/loop-control", "/dev/loop0", "/dev/fuse", "/dev/net/tun", "/dev/vsock", "/dev/kmsg",
    "/proc/kcore", "/proc/kmsg", "/proc/keys", "/proc/kallsyms", "/proc/sysrq-trigger",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("path", HOST_FILES)
def test_paths_of_the_host_do_not_exist(shared: Box, path: str) -> None:
    code = f"""
import os
path = {path!r}
try:
    print(os.listdir(path) if os.path.isdir(path) else os.read(os.open(path, os.O_RDONLY), 64))
except OSError as error:
    print([])
"""
    assert shared.printed(code) in ("[]", "b''")


def test_accounts_of_the_host_are_not_visible(shared: Box) -> None:
    accounts = shared.printed("cut -d: -f1 /etc/passwd | sort", language="shell").split()
    assert accounts == (
        ["nobody", "root", "sandbox"] if drivers.CHOSEN == "local" else ["root", IMAGE_USER]
    )
    assert shared.printed("hostname", language="shell") == "sandbox"
    assert os.uname().nodename not in shared.printed(
        "cat /etc/hosts /etc/hostname", language="shell"
    )


@pytest.mark.parametrize(
    "places",
    [
        ["/"],
        ["/proc/1/root", "/proc/1/cwd", "/proc/1/fd", "/proc/self/root", "/proc/self/cwd"],
        ["/proc/2/root", "/proc/2/cwd", "/proc/thread-self/root", "/proc/2/task/2/root"],
        ["/workspace/../../../..", "/tmp/..", "/dev/shm/../..", "/run"],
    ],
    ids=["the root", "PID 1", "the zygote", "upwards"],
)
def test_a_file_of_the_host_is_not_visible_anywhere(
    shared: Box, marked: tuple[str, Path], places: list[str]
) -> None:
    text, _ = marked
    result = shared.run(SEARCH, args=[text[::-1], *places], timeout=25)
    assert result["status"] == "success", result
    backwards = f"import sys; sys.argv[1] = sys.argv[1][::-1]\n{SEARCH}"
    result = shared.run(backwards, args=[text[::-1], *places], timeout=25)
    found = result["stdout"].rpartition(" ")[0]
    assert eval(found) == []


def test_paths_in_the_mount_table_cannot_be_opened(target: Target, shared: Box) -> None:
    code = """
import os
for line in open("/proc/self/mountinfo"):
    root = line.split()[3]
    if root == "/" or root[0] != "/" or root.startswith(("/usr", "/lib", "/bin", "/sbin")):
        continue
    place = line.split()[4]
    if place == root:
        continue
    for path in (root, "/proc/1/root" + root, "/proc/self/root" + root, os.path.dirname(root)):
        try:
            if found := os.listdir(path) if os.path.isdir(path) else open(path).read(10):
                print("opened", path, found)
        except OSError:
            pass
"""
    listed = [line for line in shared.printed(code).splitlines() if line.split()[1] not in "/etc"]
    own = [line for line in listed if "/dev" not in line.split()[1]]
    assert own == []


def test_key_database_and_log_of_the_server_are_unreachable(target: Target, shared: Box) -> None:
    data = target.server.data_dir
    secret_files = [data / "key", data / "atoll.db", data / "server.log", data / "node"]
    for path in secret_files:
        assert path.exists(), path
        assert shared.printed(f"import os; print(os.path.exists({str(path)!r}))") == "False"
        parent = str(path.parent)
        assert shared.printed(f"import os; print(os.path.exists({parent!r}))") == "False"
    key = target.server.key
    result = shared.run(
        f"import sys; sys.argv[1] = sys.argv[1][::-1]\n{SEARCH}", args=[key[::-1], "/"], timeout=25
    )
    assert eval(result["stdout"].rpartition(" ")[0]) == []
    assert data.stat().st_mode & 0o077 == 0
    assert (data / "key").stat().st_mode & 0o077 == 0


def test_files_of_another_session_are_unreachable(boxes: Callable[..., Box]) -> None:
    one, other = boxes(), boxes()
    text = secrets.token_hex(16)
    one.client.put(f"{one.files}/mine.txt", content=text.encode())
    one.printed(
        f"open('/tmp/mine', 'w').write('{text}')\nopen('/dev/shm/mine', 'w').write('{text}')"
    )
    result = other.run(
        f"import sys; sys.argv[1] = sys.argv[1][::-1]\n{SEARCH}", args=[text[::-1], "/"], timeout=25
    )
    assert eval(result["stdout"].rpartition(" ")[0]) == []
    name = one.workspace_name
    assert other.printed(f"import os; print(os.path.exists('/{name}'))") == "False"
    answer = other.client.get(f"{other.files}/..%2f..%2f{name}%2ffiles%2fmine.txt")
    assert answer.status_code == 400
    assert one.client.get(f"{one.files}/mine.txt").text == text


def test_each_session_has_its_own_user(target: Target, boxes: Callable[..., Box]) -> None:
    if "own_uid" not in target.client.get("/api/v1/nodes").json()["items"][0]["provides"]:
        pytest.skip("here sessions share a user")
    uids = {os.stat(f"/proc/{boxes().pid_1}").st_uid for _ in range(3)}
    statuses = [Path(f"/proc/{box.pid_1}/status").read_text() for box in (boxes(), boxes())]
    real = {
        line.split()[1] for text in statuses for line in text.splitlines() if line[:4] == "Uid:"
    }
    assert len(real) == 2
    assert "0" not in real
    assert uids


READ_ONLY = [
    "/", "/usr", "/usr/bin", "/bin", "/etc", "/etc/passwd", "/lib", "/run", "/run/atoll",
    "/run/atoll/executor.pyz", "/var", "/dev", "/proc", "/proc/1/comm", "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/core_pattern", "/proc/sys/vm/overcommit_memory", "/proc/sysrq-trigger",
    "/proc/sys/net/ipv4/ip_forward",
]  # fmt: skip


@pytest.mark.parametrize("path", READ_ONLY)
def test_read_only_parts_cannot_be_changed(shared: Box, path: str) -> None:
    code = f"""
import os, shutil
path = {path!r}
tries = [
    lambda: os.open(path, os.O_WRONLY | os.O_TRUNC),
    lambda: open(os.path.join(path, "new"), "w"),
    lambda: os.mkdir(os.path.join(path, "d")),
    lambda: os.chmod(path, 0o777),
    lambda: os.unlink(path),
    lambda: os.rename(path, path + "2"),
    lambda: os.symlink("/tmp", os.path.join(path, "link")),
    lambda: os.setxattr(path, "user.x", b"1"),
]
for number, attempt in enumerate(tries):
    try:
        attempt()
        print(number)
    except OSError:
        pass
"""
    assert shared.printed(code) == ""


def test_a_process_cannot_lower_its_oom_score(shared: Box) -> None:
    code = """
import os
fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
for value in (b"-1000", b"-1"):
    try:
        os.write(fd, value)
        print("lowered to", value)
    except OSError:
        pass
"""
    assert shared.printed(code) == ""


def test_no_file_of_the_kernel_can_be_written(shared: Box) -> None:
    code = """
import os
for top in ("/proc/sys", "/proc/irq", "/proc/bus", "/proc/fs", "/proc/net", "/proc/tty", "/sys"):
    for directory, _, names in os.walk(top):
        for name in names:
            path = os.path.join(directory, name)
            try:
                os.close(os.open(path, os.O_WRONLY))
                print(path)
            except OSError:
                pass
for name in os.listdir("/proc"):
    if not name.isdigit() and name not in ("self", "thread-self"):
        try:
            os.close(os.open("/proc/" + name, os.O_WRONLY))
            print("/proc/" + name)
        except OSError:
            pass
"""
    writable = set(shared.printed(code).split())
    # Settings of the sandbox's own namespaces, which the host does not see.
    own = (
        "/proc/sys/fs/mqueue/", "/proc/sys/kernel/msg", "/proc/sys/kernel/shm",
        "/proc/sys/kernel/sem", "/proc/sys/kernel/auto_msgmni", "/proc/sys/kernel/pid_max",
        "/proc/sys/kernel/ns_last_pid",
    )  # fmt: skip
    # Covered by /dev/null: written data is discarded.
    covered = {path for path in writable if path in sandbox.HIDDEN}
    assert {path for path in writable - covered if not path.startswith(own)} == set()
    seen = [path for path in writable if path.startswith(own) and not path.endswith("last_pid")]
    before = {path: Path(path).read_text() for path in seen if Path(path).exists()}
    shared.run(
        "import os, sys\n"
        "for path in sys.argv[1:]:\n"
        "    try: os.write(os.open(path, os.O_WRONLY), b'7')\n"
        "    except OSError: pass",
        args=seen,
    )
    assert {path: Path(path).read_text() for path in before} == before


@pytest.mark.parametrize("place", ["/etc", "/", "/root", "/usr/..", "relative", "/proc/self/root"])
@pytest.mark.parametrize("field", ["image", "python"])
def test_a_template_cannot_refer_to_a_path_of_the_host(
    target: Target, field: str, place: str
) -> None:
    body = {"name": "stolen", field: place if field == "image" else f"{place}/bin/python3"}
    answer = target.client.post("/api/v1/templates", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "place_not_allowed"), answer.text


def test_a_template_cannot_escape_through_a_link(target: Target) -> None:
    allowed = target.server.data_dir / "rootfs"
    allowed.mkdir(exist_ok=True)
    (allowed / "link").symlink_to("/etc")
    (allowed / "bin").symlink_to("/usr/bin")
    for body in (
        {"image": str(allowed / "link")},
        {"image": str(allowed / "link" / ".." / "root")},
        {"image": f"{allowed}/../node"},
        {"python": str(allowed / "bin" / "python3")},
        {"python": f"{allowed}/../../bin/python3"},
    ):
        answer = target.client.post("/api/v1/templates", json={"name": "stolen", **body})
        assert (answer.status_code, answer.json()["code"]) == (422, "place_not_allowed"), body
