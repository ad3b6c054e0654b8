"""A small root file system with apt, made from this machine's, and a mirror of small packages."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tests.rootfs import merge, put, put_libraries

PROGRAMS = (
    "apt-get", "apt-cache", "apt-config", "dpkg", "dpkg-deb", "dpkg-split", "dpkg-query",
    "dpkg-trigger", "dpkg-divert", "dash", "diff", "cat", "cp", "mv", "rm", "ln", "ls", "chmod",
    "chown", "mkdir", "mkfifo", "mknod", "mount", "touch", "tar", "gzip", "id", "true", "sleep",
    "head", "python3",
)  # fmt: skip
SYSTEM = ("ldconfig", "start-stop-daemon")
METHODS = ("http", "store", "copy", "file", "gpgv")


def missing() -> str | None:
    """Why no base can be created here; None if one can."""
    absent = [name for name in ("apt-get", "dpkg-deb", "dash") if shutil.which(name) is None]
    return f"{', '.join(absent)} not here" if absent else None


def make_base(place: Path) -> Path:
    """A root file system with apt, dpkg, a shell and Python."""
    merge(place)
    for name in PROGRAMS:
        put(place, f"/usr/bin/{name}")
    (place / "usr/bin/sh").symlink_to("dash")
    for name in SYSTEM:
        put(place, f"/sbin/{name}" if Path("/sbin", name).exists() else f"/usr/sbin/{name}")
    for name in METHODS:
        put(place, f"/usr/lib/apt/methods/{name}")
    _python(place)
    shutil.copytree("/usr/share/dpkg", place / "usr/share/dpkg")
    for name in ("info", "updates", "triggers", "parts"):
        (place / "var/lib/dpkg" / name).mkdir(parents=True)
    for name in ("status", "available"):
        (place / "var/lib/dpkg" / name).touch()
    for name in (
        "etc/apt/apt.conf.d", "etc/apt/preferences.d", "etc/apt/sources.list.d",
        "etc/apt/trusted.gpg.d", "etc/dpkg", "var/lib/apt", "var/cache/apt", "var/log/apt", "proc",
        "dev", "tmp", "run", "root", "home",
    ):  # fmt: skip
        (place / name).mkdir(parents=True, exist_ok=True)
    (place / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (place / "etc/group").write_text("root:x:0:\n")
    (place / "etc/os-release").write_text("ID=debian\nVERSION_CODENAME=tiny\n")
    return place


def _python(place: Path) -> None:
    version = Path(os.path.realpath("/usr/bin/python3")).name
    library = f"/usr/lib/{version}"
    shutil.copytree(
        library,
        place / library.lstrip("/"),
        ignore=shutil.ignore_patterns("__pycache__", "test", "idlelib", "config-*", "ensurepip"),
        symlinks=True,
        ignore_dangling_symlinks=True,
    )
    # Those of the C library's package that nothing of the above names.
    for name in ("librt.so.1", "libpthread.so.0", "libdl.so.2", "libutil.so.1", "libgcc_s.so.1"):
        for path in Path("/usr/lib").glob(f"*-linux-gnu/{name}"):
            put(place, str(path))
    for module in Path(library, "lib-dynload").glob("*.so"):
        put_libraries(place, str(module))


@dataclass
class Repository:
    """A directory that apt accepts as a mirror, with the suite `./`."""

    place: Path
    entries: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.place.as_uri()

    def add(
        self,
        name: str,
        version: str = "1.0",
        *,
        files: dict[str, str] | None = None,
        postinst: str | None = None,
        depends: str | None = None,
    ) -> None:
        tree = self.place / f".{name}-{version}"
        control = tree / "DEBIAN"
        control.mkdir(parents=True)
        fields = {
            "Package": name, "Version": version, "Architecture": "all", "Maintainer": "Nobody",
            "Description": "small",
        }  # fmt: skip
        if depends is not None:
            fields["Depends"] = depends
        text = "".join(f"{key}: {value}\n" for key, value in fields.items())
        (control / "control").write_text(text)
        if postinst is not None:
            (control / "postinst").write_text(f"#!/bin/sh\n{postinst}\n")
            (control / "postinst").chmod(0o755)
        for path, content in (files or {}).items():
            target = tree / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content)
            if "/bin/" in path:
                target.chmod(0o755)
        archive = self.place / f"{name}_{version}_all.deb"
        subprocess.run(
            ["dpkg-deb", "--root-owner-group", "-Zgzip", "--build", tree, archive],
            check=True,
            capture_output=True,
        )
        shutil.rmtree(tree)
        data = archive.read_bytes()
        text += f"Filename: ./{archive.name}\nSize: {len(data)}\n"
        self.entries.append(f"{text}SHA256: {hashlib.sha256(data).hexdigest()}\n")
        (self.place / "Packages").write_text("\n".join(self.entries))
