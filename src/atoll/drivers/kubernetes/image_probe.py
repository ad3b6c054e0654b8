"""
Finds out about an image by running a program in it: its interpreter, PATH and declared volumes.

The cluster's API does not describe what is in an image. The pod that runs the program also shows
whether the cluster can pull the image, and by which digest. It is confined like an instance; what
it reports decides only how instances of this image are started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any

from atoll.drivers.kubernetes.errors import ImageNotPulled, pull_error
from atoll.drivers.kubernetes.labels import Label
from atoll.drivers.kubernetes.pod_manifest import ImageFacts
from atoll.drivers.kubernetes.pod_start import FINAL_IMAGE_FAILURES, reason_to_wait
from atoll.drivers.kubernetes.pod_state import CONTAINER_FAILURES, IMAGE_FAILURES
from atoll.drivers.shared.portable_interpreter import InterpreterMissing
from atoll.errors import InstanceNotStarted, NodeFull, PermanentError
from atoll.model.image import parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.drivers.kubernetes.pod_manifest import PodRequest
    from atoll.drivers.kubernetes.pod_state import PodState
    from atoll.drivers.kubernetes.probe_pods import ProbePods
    from atoll.settings import KubernetesSettings

NO_PYTHON = frozenset({1, 126, 127, 128})
"""Exit codes of a container whose interpreter does not exist, is too old or lacks modules."""
MAX_TEXT = 1000
RESULT = "/dev/termination-log"
MAX_VOLUMES, MAX_PATH = 64, 1000
_INSIDE_PATH = re.compile(r"/[^\0,:\n]{1,200}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


PROGRAM = """
import json, os, ssl, sys
assert sys.version_info >= (3, 8)
mounts = [line.split()[4] for line in open("/proc/self/mountinfo")]
volumes = [path for path in mounts if path != "/" and not path.startswith(KNOWN)]
found = {"python": sys.executable, "path": os.environ.get("PATH", ""), "volumes": volumes}
open(RESULT, "w").write(json.dumps(found))
"""
"""Runs in the image, which must have the modules that the executor needs."""
KNOWN_MOUNTS = (
    "/proc", "/sys", "/dev", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/run/atoll",
    "/tmp", "/var/tmp", "/workspace", "/run/secrets", "/var/run/secrets",  # noqa: S108 - inside
)  # fmt: skip


def source() -> str:
    return f"RESULT, KNOWN = {RESULT!r}, {KNOWN_MOUNTS!r}\n{PROGRAM}"


class ImageProbe:
    def __init__(self, probes: ProbePods, settings: KubernetesSettings) -> None:
        self._probes = probes
        self._settings = settings
        self._timeout = settings.image_pull_timeout.total_seconds()

    async def run(
        self, reference: str, python: str, runtime: str, *, pull: str, report: Callable[[str], None]
    ) -> ImageFacts:
        """
        What is to know about the image. `python` is the interpreter that the template names, if it
        does. Raises `ImageNotPulled`, `InterpreterMissing` or `NodeFull`.
        """
        own = ImageFacts(reference, python=python or "python3")
        try:
            return await self._run(own, runtime, pull, report)
        except _NoPython as error:
            if python:
                raise InterpreterMissing(f"{reference} has no {python}: {error}") from error
            if not self._settings.interpreter_image:
                raise InterpreterMissing(
                    f"{reference} has no Python 3.8 or newer. Use an image with Python, or set "
                    "ATOLL_KUBERNETES__INTERPRETER_IMAGE to an image of Atoll, whose interpreter "
                    "is lent to it."
                ) from error
        report("The image has no Python; one is lent to it.")
        facts = await self._run(ImageFacts(reference), runtime, pull, report)
        return dataclasses.replace(facts, python="")

    async def _run(
        self, image: ImageFacts, runtime: str, pull: str, report: Callable[[str], None]
    ) -> ImageFacts:
        request = self._probes.request(
            source(), image, runtime, timeout=self._timeout, pull=pull,
            labels={Label.PROBE: "image"},
        )  # fmt: skip
        pod = await self._wait(request, report)
        if pod.exit_code == 0:
            return _facts(image, pod)
        message = (pod.exit_message or pod.waiting_message or "it does not start")[-MAX_TEXT:]
        if pod.waiting in CONTAINER_FAILURES or pod.exit_code in NO_PYTHON:
            raise _NoPython(message)
        raise InstanceNotStarted(
            f"The pod that was to look into image {image.reference} ended early "
            f"({pod.exit_reason or pod.reason or pod.disruption}): {message}"
        )

    async def _wait(self, request: PodRequest, report: Callable[[str], None]) -> PodState:
        reason = ""

        def is_over(pod: PodState | None) -> bool:
            nonlocal reason
            if pod is None or pod.ended or pod.waiting in CONTAINER_FAILURES:
                return True
            current = reason_to_wait(pod)
            if current and current != reason:
                reason = current
                report(current)
            return pod.waiting in FINAL_IMAGE_FAILURES

        try:
            pod = await self._probes.run(request, is_over, timeout=self._timeout)
        except TimeoutError:
            raise ImageNotPulled(
                f"The cluster did not run the image in time: {reason or 'no reason is known'}"
            ) from None
        if pod is None:
            raise NodeFull("The cluster removed the pod that was to look into the image.")
        if pod.waiting in IMAGE_FAILURES:
            raise pull_error(pod.waiting, pod.waiting_message)
        return pod


class _NoPython(Exception):
    """The interpreter does not start in the image."""


def _facts(image: ImageFacts, pod: PodState) -> ImageFacts:
    """From what the program reported, which is not trusted."""
    found: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        found = json.loads(pod.exit_message)
    python, path, volumes = found.get("python"), found.get("path"), found.get("volumes")
    if not isinstance(python, str) or not _INSIDE_PATH.fullmatch(python):
        raise PermanentError(
            f"The interpreter of {image.reference} did not report where it is.",
            code="image_refused",
        )
    if not isinstance(volumes, list) or len(volumes) > MAX_VOLUMES:
        volumes = []
    return ImageFacts(
        reference=_pinned(image.reference, pod.image_id),
        python=python,
        path=path if isinstance(path, str) and len(path) <= MAX_PATH else "",
        volumes=tuple(
            item for item in volumes if isinstance(item, str) and _INSIDE_PATH.fullmatch(item)
        ),
    )


def _pinned(reference: str, image_id: str) -> str:
    """The reference with the digest that the machine pulled, if it came from a registry."""
    _, at, digest = image_id.rpartition("@")
    if at and _DIGEST.fullmatch(digest):
        return parse(reference).pinned(digest)
    return reference
