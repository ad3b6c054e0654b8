"""
Checks the answers of `install_program`.

It runs in the template's image with the image's interpreter, so its answers are not trusted. An
invalid answer is `InstallFailed`, which is final for the session or template.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from packaging.utils import InvalidName, canonicalize_name

from atoll.errors import PermanentError
from atoll.model.packages import Interpreter

if TYPE_CHECKING:
    from collections.abc import Mapping

ANSWER_LIMIT = 4 * 1024 * 1024
"""Bytes of an answer."""
MAX_PACKAGES = 2000
MAX_ERROR = 2000
"""Characters of an error that are passed on."""
PINNED = re.compile(r"([a-z0-9][a-z0-9.-]{0,150})==([A-Za-z0-9][A-Za-z0-9.!+_-]{0,100})")
ABOUT = re.compile(r"[ -~]{1,200}")
"""A version or a platform."""
ENDED = (
    "The installation ended before it was complete; it may have run out of memory or disk space."
)
TOO_LONG = "The answer of the installation is too long."


class InstallFailed(PermanentError):
    code = "dependency_failed"


def decoded(data: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise InstallFailed(ENDED)
    return answer


def interpreter(answer: dict[str, Any], image: tuple[str, ...]) -> Interpreter:
    """`image` identifies the image; it is not taken from the answer."""
    version, platform, packages = (answer.get(n) for n in ("version", "platform", "packages"))
    for each in (version, platform):
        if not isinstance(each, str) or ABOUT.fullmatch(each) is None:
            raise InstallFailed("The interpreter did not report its version and platform.")
    if not isinstance(packages, dict) or len(packages) > MAX_PACKAGES:
        raise InstallFailed(f"The interpreter did not list its packages (at most {MAX_PACKAGES}).")
    if not all(isinstance(held, str) for held in packages.values()):
        raise InstallFailed("The interpreter did not list its packages with versions.")
    # Other names and versions cannot be requirements.
    known = {name: held for name, held in packages.items() if PINNED.fullmatch(f"{name}=={held}")}
    return Interpreter(str(version), str(platform), known, image=image)


def installed(answer: dict[str, Any]) -> dict[str, str]:
    """Versions by name, installed or of the template, as the installation claims."""
    if "error" in answer:
        raise InstallFailed(_plain(answer["error"]))
    listed = answer.get("installed")
    if not isinstance(listed, list) or len(listed) > MAX_PACKAGES:
        raise InstallFailed(f"The dependencies come to more than {MAX_PACKAGES} packages.")
    found = {}
    for line in listed:
        match = PINNED.fullmatch(line) if isinstance(line, str) else None
        try:
            if match is None or canonicalize_name(match[1], validate=True) != match[1]:
                raise InvalidName
        except InvalidName:
            raise InstallFailed(
                f"The installation reported an invalid package {_plain(line)[:100]!r}."
            ) from None
        found[match[1]] = match[2]
    return found


def check_held(claimed: Mapping[str, str], has: Mapping[str, str]) -> None:
    """Packages that were claimed and not installed must be the template's."""
    for name, version in claimed.items():
        if has.get(name) != version:
            raise InstallFailed(
                f"The installation reported {name}=={version}, which it did not install."
            )


def _plain(value: Any) -> str:
    """Text without characters that logs or databases reject."""
    return re.sub(r"[^\t\n -~\u00a0-\ud7ff\ue000-\ufffd]", "?", str(value)[:MAX_ERROR])
