"""
The read-only files of a sandbox: this machine's /usr and an interpreter, or a root file system
directory. Nothing that a template names is executed here: the directories of an interpreter are
found by its files. Blocking file work; callers use a thread.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.drivers.local.sandbox import LAYERED, RootFileSystem
from atoll.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from atoll.model.template import Template

OWN = {
    "dev",
    "proc",
    "sys",
    "tmp",
    "run",
    "workspace",
    "var",
    "home",
    "root",
    "mnt",
    "media",
    "boot",
}
"""Top-level directories of a root file system that are not bound into the sandbox."""
MAX_STEPS = 1000
"""Parts of a path, including those of links in it; the kernel follows 40 links."""
HOST = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
ETC_FILES = ("ld.so.cache", "localtime", "mime.types", "ld.so.conf")
ETC_DIRECTORIES = ("alternatives", "fonts", "ssl/certs", "ld.so.conf.d")

_ETC = {
    "passwd": "root:x:0:0::/nonexistent:/usr/sbin/nologin\n"
    "sandbox:x:1000:1000::/workspace:/bin/sh\n"
    "nobody:x:65534:65534::/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nsandbox:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "os-release": "ID=atoll\nNAME=Atoll\nPRETTY_NAME=Atoll sandbox\n",
    # If the host has none: packages with their own fontconfig print warnings without it.
    "fonts/fonts.conf": '<?xml version="1.0"?>\n<!DOCTYPE fontconfig SYSTEM "fonts.dtd">\n'
    '<fontconfig>\n<dir>/usr/share/fonts</dir>\n<dir prefix="xdg">fonts</dir>\n'
    '<cachedir prefix="xdg">fontconfig</cachedir>\n</fontconfig>\n',
}


def write_once(path: Path, content: bytes) -> None:
    """Write a file, unless it has this content: other replicas use it meanwhile."""
    if path.exists() and path.read_bytes() == content:
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.chmod(0o644)
    temporary.replace(path)


def write_etc(directory: Path) -> Path:
    """Write the /etc of sandboxes that use this machine's /usr."""
    etc = directory / "etc"
    etc.mkdir(exist_ok=True)
    for name in ETC_DIRECTORIES:
        (etc / name).mkdir(parents=True, exist_ok=True)
    for name, text in _ETC.items():
        write_once(etc / name, text.encode())
    for name in ETC_FILES:
        (etc / name).touch()
    # Whatever the umask: the uids of instances must be able to read it.
    for path in (etc, *etc.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return etc


def host_root(etc: Path, interpreter: str, prefixes: list[tuple[str, str]]) -> RootFileSystem:
    """This machine's /usr, and an interpreter with its directories."""
    binds: list[tuple[str, str]] = []
    links: list[tuple[str, str]] = []
    for name in HOST:
        path = Path("/") / name
        if path.is_symlink():
            links.append((os.readlink(path), str(path)))
        elif path.is_dir():
            binds.append((str(path), str(path)))
    binds.append((str(etc), "/etc"))
    for name in (*ETC_FILES, *ETC_DIRECTORIES):
        path = Path("/etc") / name
        if path.exists():
            binds.append((str(path.resolve()), f"/etc/{name}"))
    for prefix, inside in prefixes:
        if not any(inside == bound or inside.startswith(f"{bound}/") for _, bound in binds):
            binds.append((prefix, inside))
    search = f"{os.path.dirname(interpreter)}:/usr/local/bin:/usr/bin:/bin"
    return RootFileSystem(tuple(binds), tuple(links), interpreter, search)


def _own_interpreter() -> tuple[str, list[tuple[str, str]]]:
    base = os.path.realpath(sys.base_prefix)
    return os.path.realpath(sys.executable), [(base, base)]


def _interpreter(python: Path, roots: tuple[Path, ...] | None) -> tuple[str, list[tuple[str, str]]]:
    """
    Path of an interpreter in the sandbox, and the directories that it needs, on the host and in the
    sandbox: its prefix, and for a virtual environment also the prefix of its base.

    With `roots`, they must be below one of these, the system's, or those of Atoll's interpreter.
    """
    if not python.is_file() or not os.access(python, os.X_OK):
        raise InvalidRequest(
            f"python: {python} does not exist on this node or is not executable.", field="python"
        )
    real = python.resolve()
    # The last part is not resolved: Python finds a virtual environment by the path that is called.
    called = python.parent.resolve() / python.name
    config = called.parent.parent / "pyvenv.cfg"
    if config.is_file():
        home = _home(config)
        places = [called.parent.parent, _prefix(home.resolve())]
        # Links in the environment may use this path.
        named = Path(os.path.normpath(_prefix(home)))
        binds = [
            *((str(directory), str(directory)) for directory in places),
            (str(places[1]), str(named)),
        ]
    else:
        called = real
        places = [_prefix(real.parent)]
        binds = [(str(places[0]), str(places[0]))]
    allowed = (Path("/usr"), Path(sys.base_prefix).resolve(), *_resolved(roots or ()))
    for directory in places:
        if directory == Path("/") or (roots is not None and not _is_below(directory, allowed)):
            raise _not_allowed(f"python: {python} needs {directory}, which", roots or ())
    if not _is_below(real, places):
        raise _not_allowed(f"python: {python} leads to {real}, which", roots or ())
    return str(called), list(dict.fromkeys(binds))


def _prefix(directory: Path) -> Path:
    return directory.parent if directory.name == "bin" else directory


def _home(config: Path) -> Path:
    """The directory of the interpreter on which a virtual environment is based."""
    for line in config.read_text(errors="replace").splitlines():
        key, _, value = line.partition("=")
        if key.strip().lower() == "home" and os.path.isabs(value.strip()):
            return Path(value.strip())
    raise InvalidRequest(f"python: {config} does not name its base.", field="python")


def _resolved(roots: Iterable[Path]) -> list[Path]:
    return [root.resolve() for root in roots]


def _is_below(path: Path, places: Iterable[Path]) -> bool:
    return any(directory == path or directory in path.parents for directory in places)


def _not_allowed(what: str, roots: tuple[Path, ...], field: str = "python") -> InvalidRequest:
    allowed = ", ".join(str(root) for root in roots)
    return InvalidRequest(
        f"{what} is not below a template root of this node ({allowed}). "
        "Set ATOLL_LOCAL__TEMPLATE_ROOTS to allow it.",
        code="place_not_allowed",
        field=field,
    )


def image_root(image: Path, python: str) -> RootFileSystem:
    """
    A root file system directory. Its /proc, /dev, /tmp, /run and /var are replaced.
    """
    if not image.is_dir():
        raise InvalidRequest(f"image: {image} is not a directory on this node.", field="image")
    binds: list[tuple[str, str]] = []
    links: list[tuple[str, str]] = []
    for entry in [*_entries(image, OWN | {"opt"}), *_entries(image / "opt", {"atoll"})]:
        inside = f"/{os.path.relpath(entry.path, image)}"
        if entry.is_symlink():
            links.append((os.readlink(entry.path), inside))
        else:
            binds.append((entry.path, inside))
    return RootFileSystem(tuple(binds), tuple(links), _image_python(image, python))


def layered_root(directories: tuple[Path, ...], python: str) -> RootFileSystem:
    """A root file system of several layers, the highest first."""
    binds: list[tuple[str, str]] = []
    links: list[tuple[str, str]] = []
    for parent, without in (("", OWN | {"opt"}), ("opt", {"atoll"})):
        for entry in _merged(directories, parent, without):
            inside = f"/{parent}/{entry.name}" if parent else f"/{entry.name}"
            if entry.is_symlink():
                links.append((os.readlink(entry.path), inside))
            else:
                binds.append((f"{LAYERED}{inside}", inside))
    for number, directory in enumerate(directories):
        try:
            interpreter = _image_python(directory, python)
            break
        except InvalidRequest:
            if number == len(directories) - 1:
                raise
    return RootFileSystem(
        tuple(binds), tuple(links), interpreter, layers=tuple(map(str, directories))
    )


def _merged(
    directories: tuple[Path, ...], parent: str, without: set[str]
) -> list[os.DirEntry[str]]:
    """Entries of a directory of an overlay."""
    found: dict[str, os.DirEntry[str]] = {}
    gone = set(without)
    for directory in directories:
        for entry in _entries(directory / parent, gone):
            # An overlay marks a deleted entry with a character device.
            if not stat.S_ISCHR(entry.stat(follow_symlinks=False).st_mode):
                found[entry.name] = entry
            gone.add(entry.name)
        if parent and os.path.lexists(directory / parent) and _hides(directory / parent):
            break
    return [found[name] for name in sorted(found)]


def _hides(directory: Path) -> bool:
    """Whether a directory hides the directories of lower layers."""
    if directory.is_symlink() or not directory.is_dir():
        return True
    try:
        return os.getxattr(directory, "trusted.overlay.opaque") == b"y"
    except OSError:
        return False


def _entries(directory: Path, without: set[str]) -> list[os.DirEntry[str]]:
    """
    Entries of a directory of an image. Entries of /opt are bound one by one, because package
    environments are mounted there.
    """
    if directory.is_symlink() or not directory.is_dir():
        return []
    found = [entry for entry in os.scandir(directory) if entry.name not in without]
    return sorted(found, key=lambda entry: entry.name)


def _image_python(image: Path, python: str) -> str:
    candidates = (
        [python] if python else ["/usr/local/bin/python3", "/usr/bin/python3", "/bin/python3"]
    )
    for candidate in candidates:
        # It may be a link that is absolute in the image, so only its existence is checked.
        if _is_inside(image, candidate):
            return candidate
    raise InvalidRequest(
        f"image: {image} has no {' or '.join(candidates)}; the executor needs Python 3.8 or newer.",
        field="image",
    )


def _is_inside(image: Path, path: str) -> bool:
    """
    Whether a root file system has this path. Links are resolved inside the root file system; files
    of this machine are never accessed.
    """
    below: list[str] = []
    ahead = list(reversed(Path(path).parts))
    for _ in range(MAX_STEPS):
        if not ahead:
            return True
        part = ahead.pop()
        if part == "/":
            below.clear()
        elif part == "..":
            del below[-1:]
        else:
            here = image.joinpath(*below, part)
            try:
                mode = here.lstat().st_mode
            except (OSError, ValueError):
                return False
            if ahead and stat.S_ISLNK(mode):
                ahead += reversed(Path(os.readlink(here)).parts)
            else:
                below.append(part)
    return False


def root_of(
    template: Template,
    etc: Path,
    default_python: Path | None,
    roots: tuple[Path, ...],
    layers: tuple[Path, ...] = (),
) -> RootFileSystem:
    """`layers` are the directories of the template's layers, the highest first."""
    if layers:
        return layered_root((*layers, Path(template.root)), template.python)
    if template.root:
        return image_root(Path(template.root), template.python)
    if template.python:
        return host_root(etc, *_interpreter(Path(template.python), roots))
    return default_root(etc, default_python)


def default_root(etc: Path, python: Path | None) -> RootFileSystem:
    """Of templates without a root file system or interpreter of their own."""
    if python is not None:
        # Allowed, because the owner of the node configured it.
        return host_root(etc, *_interpreter(python, None))
    return host_root(etc, *_own_interpreter())


def identity(template: Template) -> tuple[str, ...]:
    """
    Identifies a template's root file system by its paths, without its contents. Equal for templates
    with the same one, and on all nodes.
    """
    if template.root:
        layers = (layer.name for layer in template.layers)
        return ("root", template.root, template.python, *layers)
    return ("host", template.python)


def check_usable(tree: RootFileSystem) -> None:
    """Refuse interpreters in directories that the sandbox replaces."""
    for source, inside in tree.binds:
        top = inside.split("/")[1]
        if top in OWN and top not in ("home", "root", "mnt", "media", "boot", "var"):
            raise InvalidRequest(
                f"python: {source} would be in /{top}, which the sandbox replaces. Move the "
                "interpreter to another directory.",
                code="place_not_usable",
                field="python",
            )


def check_allowed(template: Template, roots: tuple[Path, ...]) -> None:
    """
    Refuse paths that the owner of the node has not allowed: a template gives its users access to
    them.
    """
    if ".." in Path(template.python).parts:
        raise _not_allowed(f"python: {template.python}", roots)
    named = [("image" if template.image else "base_image", template.root)]
    if not template.root:
        named.append(("python", template.python))
    for field, value in named:
        if not value:
            continue
        path = Path(value)
        # First by its name, so that errors reveal nothing about other files.
        allowed = [*roots, *_resolved(roots)]
        if not path.is_absolute() or ".." in path.parts or not _is_below(path, allowed):
            raise _not_allowed(f"{field}: {value}", roots, field)
        try:
            real = path.resolve() if field != "python" else path.parent.resolve() / path.name
        except (OSError, RuntimeError, ValueError):
            # A loop of links, an unreadable link, or a NUL.
            raise _not_allowed(f"{field}: {value}", roots, field) from None
        if not _is_below(real, _resolved(roots)):
            raise _not_allowed(f"{field}: {value}", roots, field)
