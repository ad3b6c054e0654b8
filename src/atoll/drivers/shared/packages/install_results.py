"""
What the program of an installation answers, checked.

It runs in the template's image, with the image's interpreter: both may say anything. Whatever is
not what it should be is `InstallFailed`, which is final for the session or template that asked.
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
    "The installation ended before it was done; it may have run out of memory or of room on the "
    "disk."
)
TOO_LONG = "The installation answered with more than it may."


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
    """`image` is which one it runs in, which we know ourselves."""
    version, platform, packages = (answer.get(n) for n in ("version", "platform", "packages"))
    for each in (version, platform):
        if not isinstance(each, str) or ABOUT.fullmatch(each) is None:
            raise InstallFailed("Its interpreter does not tell its version and platform.")
    if not isinstance(packages, dict) or len(packages) > MAX_PACKAGES:
        raise InstallFailed(f"Its interpreter does not list its packages, {MAX_PACKAGES} at most.")
    if not all(isinstance(held, str) for held in packages.values()):
        raise InstallFailed("Its interpreter does not list its packages with versions.")
    # What no index could have cannot be asked for.
    known = {name: held for name, held in packages.items() if PINNED.fullmatch(f"{name}=={held}")}
    return Interpreter(str(version), str(platform), known, image=image)


def installed(answer: dict[str, Any]) -> dict[str, str]:
    """The versions that were installed or are the template's, by name. It may be a lie."""
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
            raise InstallFailed(f"The installation told of {_plain(line)[:100]!r}.") from None
        found[match[1]] = match[2]
    return found


def check_held(claimed: Mapping[str, str], has: Mapping[str, str]) -> None:
    """What is told of and was not installed must be the template's."""
    for name, version in claimed.items():
        if has.get(name) != version:
            raise InstallFailed(f"The installation told of {name}=={version}, which is not there.")


def _plain(words: Any) -> str:
    """Text that every log and database takes."""
    return re.sub(r"[^\t\n -~\u00a0-\ud7ff\ue000-\ufffd]", "?", str(words)[:MAX_ERROR])
