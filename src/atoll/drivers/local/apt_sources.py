"""
The sources.list of a build, with addresses of the sandbox's loopback in place of the mirrors'.

`apt_proxy` answers there. Blocking file work; callers use a thread.
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

MAX_FILE = 1024 * 1024
"""Bytes of a sources file in a root file system."""

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
class AptSources:
    lines: tuple[str, ...]
    addresses: tuple[str, ...]
    """Addresses of the mirrors, in the order of the proxy's numbers."""


class _SourcesList:
    def __init__(self) -> None:
        self._addresses: list[str] = []
        self._lines: list[str] = []

    def add(self, options: list[str], address: str, rest: list[str]) -> None:
        if not address.startswith(("http://", "https://")):
            return  # Not reachable from a build.
        self.add_any(options, address, rest)

    def add_any(self, options: list[str], address: str, rest: list[str]) -> None:
        if address not in self._addresses:
            self._addresses.append(address)
        number = self._addresses.index(address)
        shown = [f"[{' '.join(options)}]"] if options else []
        here = f"http://127.0.0.1:{PORT}/{number}/"
        self._lines.append(" ".join(["deb", *shown, here, *rest]))

    @property
    def sources(self) -> AptSources:
        return AptSources(tuple(self._lines), tuple(self._addresses))


def sources_of(base: Path, settings: PackageSettings) -> AptSources:
    """The mirror of the settings, or the sources of the root file system."""
    lines = _SourcesList()
    if settings.debian_mirror is not None:
        suite = settings.debian_suite or _codename(base)
        parts = [] if suite.endswith("/") else settings.debian_components.split()
        options = ["trusted=yes"] if settings.debian_unsigned else []
        lines.add_any(options, settings.debian_mirror, [suite, *parts])
        return lines.sources
    apt = base / "etc" / "apt"
    for path in (apt / "sources.list", *sorted((apt / "sources.list.d").glob("*.list"))):
        for line in _read(path).splitlines():
            _add_line(lines, line)
    for path in sorted((apt / "sources.list.d").glob("*.sources")):
        for stanza in _read(path).split("\n\n"):
            _add_stanza(lines, stanza)
    if not lines.sources.lines:
        raise InvalidRequest(
            f"base_image: {base} has no sources of Debian packages; set "
            "ATOLL_PACKAGES__DEBIAN_MIRROR.",
            field="base_image",
        )
    return lines.sources


def _read(path: Path) -> str:
    # A link would be resolved on this machine instead of in the root file system.
    if path.is_symlink() or not path.is_file():
        return ""
    with path.open(errors="replace") as file:
        return file.read(MAX_FILE)


def _codename(base: Path) -> str:
    for path in ("etc/os-release", "usr/lib/os-release"):
        for line in _read(base / path).splitlines():
            name, _, value = line.partition("=")
            if name == "VERSION_CODENAME":
                return "".join(shlex.split(value))
    raise InvalidRequest(
        f"base_image: {base} does not state its release; set ATOLL_PACKAGES__DEBIAN_SUITE.",
        field="base_image",
    )


def _add_line(lines: _SourcesList, line: str) -> None:
    """`deb [option=value ...] address suite component ...`"""
    fields = line.partition("#")[0].split()
    if len(fields) < 3 or fields[0] != "deb":
        return
    options: list[str] = []
    rest = fields[1:]
    if rest[0].startswith("["):
        end = next((n for n, word in enumerate(rest) if word.endswith("]")), None)
        if end is None:
            return
        options = " ".join(rest[: end + 1]).strip("[] ").split()
        rest = rest[end + 1 :]
    if len(rest) >= 2:
        lines.add(options, rest[0], rest[1:])


def _add_stanza(lines: _SourcesList, text: str) -> None:
    """The deb822 format: every URI is combined with every suite."""
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
