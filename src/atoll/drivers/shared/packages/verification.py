"""
Lets `verify_program` check and copy what an installation has installed, and compares that with what
the installation reported.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import structlog
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from atoll.drivers.shared import subprogram
from atoll.drivers.shared.packages import verify_program
from atoll.drivers.shared.packages.install_results import InstallFailed
from atoll.drivers.shared.packages.wheel_files import INFO

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.drivers.base import InstallSpec, Wheel
    from atoll.drivers.shared.packages.installation import InstallOutput

VERIFY_TIMEOUT = 600.0
"""Seconds to check and copy what was installed, on a slow disk as well."""

log = structlog.get_logger(__name__)


async def verify(
    made: InstallOutput, kept: Path, spec: InstallSpec, claimed: dict[str, str]
) -> tuple[set[str], tuple[str, ...]]:
    """
    Copy the installed packages to `kept`; returns their names and the digests of their wheels.
    Raises `InstallFailed` if they differ from what the installation claimed.
    """
    wheels = spec.wheels()
    request = {
        "image": None if made.image is None else str(made.image),
        "mount": str(made.build),
        "source": str(made.build / "target"),
        "target": str(kept),
        "python": made.python,
        "wheels": [{"path": str(each.path), "digest": each.digest} for each in wheels],
        "source_builds": spec.source_builds,
    }
    names, digests = set(), []
    for info, digest in await _run(request):
        name, version = _identified(info, digest, wheels)
        if name not in claimed or _version(claimed[name]) != version:
            raise InstallFailed(f"{info[:200]} was installed, but not reported.")
        names.add(name)
        digests.append(digest)
    return names, tuple(sorted(digests))


async def _run(request: dict[str, Any]) -> list[tuple[str, str]]:
    """The verified distributions: names of their `.dist-info` and digests of their wheels."""
    process = await asyncio.create_subprocess_exec(
        *subprogram.command(verify_program),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd="/",
        env={},
    )  # fmt: skip
    try:
        async with asyncio.timeout(VERIFY_TIMEOUT):
            output, errors = await process.communicate(json.dumps(request).encode())
    except TimeoutError:
        raise InstallFailed(
            f"The installed packages could not be verified within {VERIFY_TIMEOUT:g} s."
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        log.warning("install.not_collected", error=errors.decode(errors="replace")[-2000:])
        raise InstallFailed("The installed packages could not be verified and copied.")
    answer = json.loads(output)
    if "error" in answer:
        raise InstallFailed(answer["error"])
    return [(info, digest) for info, digest in answer["distributions"]]


def _identified(info: str, digest: str, wheels: list[Wheel]) -> tuple[str, Version]:
    """Name and version: by the file name of the wheel, or as stated by a source build."""
    try:
        for wheel in wheels:
            if digest and wheel.digest == digest:
                name, version, _, _ = parse_wheel_filename(wheel.name)
                return name, version
        stated, _, number = info.removesuffix(INFO).partition("-")
        return canonicalize_name(stated, validate=True), Version(number)
    except (InvalidWheelFilename, InvalidVersion, ValueError) as error:
        raise InstallFailed(f"{info[:200]} is not the name of a package.") from error


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None
