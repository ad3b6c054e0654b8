"""Where the zygote and its children find modules, and where modules find settings on import."""

from __future__ import annotations

import os
import site
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

BUNDLE = sys.path[0] if sys.path else ""
INSIDE = "/run/atoll/inside/lib"
"""Directory with `atoll_session`. Last on the path: it hides no module of template or user."""
HOMES = ("HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR")
"""Variables that name places of settings and caches, which user code can write to."""


def set_up(hooks: bool) -> None:
    """
    Set the module path of user code, as an interpreter without -I -S would, and remove the bundle.

    Start-up code of packages (lines of .pth files, sitecustomize) does not run here: if the
    interpreter is this machine's, that code is meant for this machine and not for sandboxes. For a
    template's own interpreter `run_hooks` adds the packages too; in a virtual environment they are
    in other directories.
    """
    sys.path[:] = [entry for entry in sys.path if entry != BUNDLE]
    if not hooks:
        for directory in site.getsitepackages():
            _add_site(directory)
    sys.path.append(INSIDE)
    site.setquit()
    site.setcopyright()
    site.sethelper()


def run_hooks() -> None:
    """Run the start-up code of packages; for an interpreter that belongs to the template."""
    site.main()


def leave_home() -> Callable[[], None]:
    """
    Change to / and to an empty home directory; the returned function restores the home. Modules
    read settings and caches when they are imported, and execute some of them. Files in the
    workspace and in /tmp belong to user code, and none of it may run here.
    """
    homes = {name: os.environ[name] for name in HOMES if name in os.environ}
    place = "/tmp/.zygote-%s" % os.urandom(8).hex()  # noqa: S108 - private to the instance
    try:
        os.mkdir(place, 0o700)
    except OSError:
        pass  # User code has filled /tmp, so no home directory can be created.
    os.environ.update(dict.fromkeys(homes, place))
    os.chdir("/")

    def restore() -> None:
        os.environ.update(homes)
        try:
            os.rmdir(place)
        except OSError:
            pass  # Modules have written files there, and may read them later.

    return restore


def _add_site(directory: str) -> None:
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return
    sys.path.append(directory)
    for name in names:
        if not name.endswith(".pth"):
            continue
        try:
            with open(os.path.join(directory, name), encoding="utf-8") as file:
                lines = file.read().splitlines()
        except (OSError, ValueError):
            continue
        for line in lines:
            path = os.path.join(directory, line.strip())
            code = line.startswith(("import ", "import\t", "#"))
            if line.strip() and not code and os.path.exists(path):
                sys.path.append(path)
