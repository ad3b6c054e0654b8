"""The bubblewrap command, and which places a template may name."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from atoll.drivers.local import root_file_system, sandbox
from atoll.drivers.shared import environment_variables, instance_paths
from atoll.drivers.shared.packages import install_program
from atoll.errors import InvalidRequest
from atoll.model.resources import Resources
from atoll.model.template import Template

TREE = sandbox.RootFileSystem(
    binds=(("/usr", "/usr"), ("/data/etc", "/etc")), links=(("usr/bin", "/bin"),), python="/py"
)


def box(**changes: object) -> sandbox.Sandbox:
    fields: dict[str, object] = {
        "tree": TREE, "executor": "/data/executor.pyz", "inside": "/data/inside",
        "workspace": "/data/workspace", "packages": "/data/packages",
        "hidden": ("/proc/kcore", "/proc/scsi/"), "tmp_size": 4096,
    }  # fmt: skip
    return sandbox.Sandbox(**(fields | changes))  # type: ignore[arg-type]


def arguments(**changes: object) -> list[str]:
    return sandbox.arguments("/usr/bin/bwrap", box(**changes), lambda path: f"/stage{path}")


def pairs(argv: list[str], option: str, count: int = 2) -> list[tuple[str, ...]]:
    return [tuple(argv[i + 1 : i + 1 + count]) for i, word in enumerate(argv) if word == option]


def installation(gateway: str | None = "/data/gateway.sock") -> list[str]:
    box = sandbox.Installation(
        tree=TREE, program="/code/install.py", uv="/code/uv", gateway=gateway, build="/data/build",
        hidden=("/proc/kcore",), tmp_size=4096,
    )  # fmt: skip
    return sandbox.installation_arguments("/usr/bin/bwrap", box, lambda path: f"/stage{path}")


def test_an_installation_has_no_network_and_one_socket() -> None:
    argv = installation()
    assert "--unshare-net" in argv
    assert ("/stage/data/gateway.sock", install_program.GATEWAY) in pairs(argv, "--ro-bind")
    assert install_program.GATEWAY not in installation(gateway=None)


def test_an_installation_writes_to_its_own_directory_and_ends_with_its_owner() -> None:
    argv = installation()
    assert pairs(argv, "--bind") == [("/stage/data/build", "/build")]
    assert "--die-with-parent" in argv
    assert pairs(argv, "--cap-drop", 1) == [("ALL",)]
    assert instance_paths.PACKAGES not in argv


def test_every_namespace_is_unshared() -> None:
    argv = arguments()
    for name in ("user", "pid", "net", "ipc", "uts"):
        assert f"--unshare-{name}" in argv
    assert "--unshare-cgroup-try" in argv
    assert "--share-net" not in argv


def test_capabilities_and_environment_are_dropped() -> None:
    argv = arguments()
    assert pairs(argv, "--cap-drop", 1) == [("ALL",)]
    assert "--clearenv" in argv
    assert "--new-session" in argv
    assert argv.index("--clearenv") < argv.index("--setenv")
    assert {name for name, _ in pairs(argv, "--setenv")} == {
        "PATH", "PYTHONPATH", "PWD", "ATOLL_PYTHON", *environment_variables.INSTANCE,
    }  # fmt: skip


def test_only_the_workspace_is_bound_writable() -> None:
    argv = arguments()
    assert pairs(argv, "--bind") == [("/stage/data/workspace", "/workspace")]
    assert ("/stage/usr", "/usr") in pairs(argv, "--ro-bind")
    assert ("/stage/data/executor.pyz", instance_paths.EXECUTOR) in pairs(argv, "--ro-bind")
    assert ("/stage/data/inside", instance_paths.INSIDE) in pairs(argv, "--ro-bind")
    assert ("/stage/data/packages", instance_paths.PACKAGES) in pairs(argv, "--ro-bind")
    assert "--dev-bind" not in argv


def test_the_root_becomes_read_only_after_everything_else_is_mounted() -> None:
    argv = arguments()
    last = len(argv) - 1 - argv[::-1].index("--remount-ro")
    assert argv[last + 1] == "/"
    for option in ("--bind", "--ro-bind", "--tmpfs", "--dir", "--symlink", "--proc"):
        assert max(i for i, word in enumerate(argv) if word == option) < last


def test_every_file_system_in_memory_has_a_size() -> None:
    argv = arguments()
    for index, word in enumerate(argv):
        if word == "--tmpfs":
            assert argv[index - 2] == "--size", argv[index + 1]


def test_parts_of_proc_that_reveal_the_host_are_covered() -> None:
    argv = arguments()
    proc = argv.index("--proc")
    assert argv.index("/proc/kcore") > proc
    assert ("/dev/null", "/proc/kcore") in pairs(argv, "--ro-bind")
    assert argv.index("/proc/scsi/") > proc


@pytest.mark.parametrize(
    ("field", "option"), [("seccomp", "--seccomp"), ("ephemeral", "--die-with-parent")]
)
def test_optional_arguments_follow_the_options(field: str, option: str) -> None:
    assert option in arguments(**{field: True})
    assert option not in arguments(**{field: False})


def test_the_executor_is_pid_1_of_an_isolated_interpreter() -> None:
    argv = arguments(preload=("numpy", "os"))
    assert "--as-pid-1" in argv
    assert argv[-7:-2] == ["/py", "-I", "-S", "-B", "-c"]
    assert json.loads(argv[-1])["preload"] == ["numpy", "os"]


def template(**fields: object) -> Template:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    base: dict[str, object] = {
        "id": "t", "name": "t", "created_at": now, "updated_at": now,
        "default_resources": Resources(1, 1 << 26, 1 << 24, 16),
    }  # fmt: skip
    return Template(**(base | fields))  # type: ignore[arg-type]


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, ...]:
    allowed = tmp_path / "rootfs"
    (allowed / "debian/bin").mkdir(parents=True)
    (tmp_path / "outside/bin").mkdir(parents=True)
    (allowed / "link").symlink_to(tmp_path / "outside")
    (allowed / "debian/python3").symlink_to("/usr/bin/python3")
    (tmp_path / "rootfs-evil").mkdir()
    return (allowed, tmp_path / "second")


@pytest.mark.parametrize(
    ("field", "place"),
    [
        ("image", "rootfs"), ("image", "rootfs/debian"),
        ("image", "second/x"), ("python", "rootfs/debian/bin/python3"),
        # A virtual environment's interpreter is a link to the host's, by its nature.
        ("python", "rootfs/debian/python3"),
    ],
)  # fmt: skip
def test_paths_beneath_a_root_are_allowed(
    tmp_path: Path, roots: tuple[Path, ...], field: str, place: str
) -> None:
    root_file_system.check_allowed(template(**{field: str(tmp_path / place)}), roots)


@pytest.mark.parametrize(
    ("field", "place"),
    [
        ("image", "outside"), ("image", "rootfs/link"), ("image", "rootfs/../outside"),
        ("image", "rootfs-evil"), ("image", "."), ("image", "rootfs/link/bin"),
        ("image", "rootfs/debian/../debian"),
        ("python", "outside/bin/python3"), ("python", "rootfs/link/bin/python3"),
        ("python", "rootfs/../outside/bin/python3"), ("python", "rootfs-evil/python3"),
    ],
)  # fmt: skip
def test_paths_that_lead_outside_are_refused(
    tmp_path: Path, roots: tuple[Path, ...], field: str, place: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        root_file_system.check_allowed(template(**{field: str(tmp_path / place)}), roots)
    assert caught.value.code == "place_not_allowed"


@pytest.mark.parametrize("place", ["rootfs/debian", "../etc", "~", "etc"])
def test_relative_paths_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, roots: tuple[Path, ...], place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for field in ("image", "python"):
        with pytest.raises(InvalidRequest):
            root_file_system.check_allowed(template(**{field: place}), roots)


def test_a_template_without_a_path_is_always_allowed() -> None:
    root_file_system.check_allowed(template(), ())


def test_an_image_without_an_interpreter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        root_file_system.image_root(tmp_path, "")
    with pytest.raises(InvalidRequest):
        root_file_system.image_root(tmp_path / "nothing", "")


def test_an_image_cannot_replace_directories_of_the_sandbox(tmp_path: Path) -> None:
    for name in ("usr", "proc", "dev", "sys", "tmp", "run", "workspace", "root", "home", "etc"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin").symlink_to("usr/bin")
    (tmp_path / "usr/bin").mkdir()
    (tmp_path / "usr/bin/python3").touch()
    tree = root_file_system.image_root(tmp_path, "")
    assert {inside for _, inside in tree.binds} == {"/usr", "/etc"}
    assert tree.links == (("usr/bin", "/bin"),)
    assert tree.python == "/usr/bin/python3"


def test_volumes_are_mounted_before_the_root_becomes_read_only_and_hide_image_directories() -> None:
    tree = sandbox.RootFileSystem(
        binds=(*TREE.binds, ("/image/data", "/data"), ("/image/srv", "/srv")),
        links=(*TREE.links, ("/elsewhere", "/mnt")),
        python="/py",
    )
    volumes = (("/host/a", "/data/a", True), ("/host/b", "/mnt/x/b", False))
    argv = arguments(tree=tree, volumes=volumes)
    words = " ".join(argv)
    bound = "--ro-bind /stage/host/a /data/a --bind /stage/host/b /mnt/x/b --remount-ro / "
    assert bound in words
    assert "/stage/image/data" not in argv
    assert "/elsewhere" not in argv
    assert "/stage/image/srv" in argv
