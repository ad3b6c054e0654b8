"""
Where apt finds packages in a build: the lines of its sources, with the addresses taken out.

An address is replaced by one of the sandbox's own loopback, at which `mirror` answers. Blocking
file work; callers use a thread.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.drivers.local.layer_builder import PORT, SCRATCH
from atoll.errors import InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.settings import PackageSettings

MOST_BYTES = 1024 * 1024
"""Of sources that a root file system brings."""

CONFIG = f"""\
Dir::Etc::sourcelist "{SCRATCH}/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::State::lists "{SCRATCH}/lists/";
Dir::Cache "{SCRATCH}/cache/";
APT::Sandbox::User "root";
APT::Install-Recommends "false";
APT::Install-Suggests "false";
APT::Get::Assume-Yes "true";
APT::Cmd::Pattern-Only "true";
APT::Update::Error-Mode "any";
Acquire::Languages "none";
Acquire::Retries "0";
Acquire::http::Proxy "DIRECT";
Acquire::http::AllowRedirect "false";
DPkg::Use-Pty "0";
DPkg::Options {{ "--force-confdef"; "--force-confold"; "--force-unsafe-io"; }};
"""


@dataclass(frozen=True)
class Sources:
    lines: tuple[str, ...]
    addresses: tuple[str, ...]
    """In the order of their numbers."""


class _Lines:
    def __init__(self) -> None:
        self._addresses: list[str] = []
        self._lines: list[str] = []

    def add(self, options: list[str], address: str, rest: list[str]) -> None:
        if not address.startswith(("http://", "https://")):
            return  # Nothing that could be reached from inside.
        self.add_any(options, address, rest)

    def add_any(self, options: list[str], address: str, rest: list[str]) -> None:
        if address not in self._addresses:
            self._addresses.append(address)
        number = self._addresses.index(address)
        shown = [f"[{' '.join(options)}]"] if options else []
        here = f"http://127.0.0.1:{PORT}/{number}/"
        self._lines.append(" ".join(["deb", *shown, here, *rest]))

    @property
    def sources(self) -> Sources:
        return Sources(tuple(self._lines), tuple(self._addresses))


def of(base: Path, settings: PackageSettings) -> Sources:
    """The mirror of the settings, or those that the root file system names itself."""
    lines = _Lines()
    if settings.debian_mirror is not None:
        suite = settings.debian_suite or _codename(base)
        parts = [] if suite.endswith("/") else settings.debian_components.split()
        options = ["trusted=yes"] if settings.debian_unsigned else []
        lines.add_any(options, settings.debian_mirror, [suite, *parts])
        return lines.sources
    apt = base / "etc" / "apt"
    for path in (apt / "sources.list", *sorted((apt / "sources.list.d").glob("*.list"))):
        for line in _read(path).splitlines():
            _one_line(lines, line)
    for path in sorted((apt / "sources.list.d").glob("*.sources")):
        for stanza in _read(path).split("\n\n"):
            _stanza(lines, stanza)
    if not lines.sources.lines:
        raise InvalidRequest(
            f"base_image: {base} names no mirror of Debian packages; set "
            "ATOLL_PACKAGES__DEBIAN_MIRROR.",
            field="base_image",
        )
    return lines.sources


def _read(path: Path) -> str:
    # A link would be resolved on this machine instead of in the root file system.
    if path.is_symlink() or not path.is_file():
        return ""
    with path.open(errors="replace") as file:
        return file.read(MOST_BYTES)


def _codename(base: Path) -> str:
    for place in ("etc/os-release", "usr/lib/os-release"):
        for line in _read(base / place).splitlines():
            name, _, value = line.partition("=")
            if name == "VERSION_CODENAME":
                return "".join(shlex.split(value))
    raise InvalidRequest(
        f"base_image: {base} does not say which release it is; set ATOLL_PACKAGES__DEBIAN_SUITE.",
        field="base_image",
    )


def _one_line(lines: _Lines, line: str) -> None:
    """`deb [option=value ...] address suite component ...`"""
    words = line.partition("#")[0].split()
    if len(words) < 3 or words[0] != "deb":
        return
    options: list[str] = []
    rest = words[1:]
    if rest[0].startswith("["):
        end = next((n for n, word in enumerate(rest) if word.endswith("]")), None)
        if end is None:
            return
        options = " ".join(rest[: end + 1]).strip("[] ").split()
        rest = rest[end + 1 :]
    if len(rest) >= 2:
        lines.add(options, rest[0], rest[1:])


def _stanza(lines: _Lines, text: str) -> None:
    """The other format: fields with lists of words, of which each is combined with each."""
    fields: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        if line.startswith((" ", "\t")):
            fields[name] = f"{fields.get(name, '')} {line.strip()}"
        else:
            name, _, value = line.partition(":")
            name = name.strip().lower()
            fields[name] = value.strip()
    if "deb" not in fields.get("types", "").split() or fields.get("enabled", "").lower() == "no":
        return
    options = []
    if (signed := fields.get("signed-by", "")).startswith("/") and " " not in signed:
        options.append(f"signed-by={signed}")
    if architectures := fields.get("architectures", "").split():
        options.append(f"arch={','.join(architectures)}")
    for address in fields.get("uris", "").split():
        for suite in fields.get("suites", "").split():
            lines.add(options, address, [suite, *fields.get("components", "").split()])
