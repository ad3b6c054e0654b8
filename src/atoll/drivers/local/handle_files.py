"""
Handles of instances, each in a file of the instance's directory.

The directory is made before the instance starts and removed after it has ended; the handle is
written as soon as the instance runs. Blocking file work; callers use a thread.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

import structlog

from atoll.model.instance import Handle

if TYPE_CHECKING:
    from pathlib import Path

HANDLE_VERSION = 1
FILE = "handle.json"

log = structlog.get_logger(__name__)


class HandleFiles:
    def __init__(self, instances: Path, kind: str) -> None:
        self._instances = instances
        self._kind = kind

    def directory(self, instance_id: str) -> Path:
        return self._instances / instance_id

    def names(self) -> set[str]:
        """Ids of all instances that have a directory."""
        return {entry.name for entry in os.scandir(self._instances)}

    def write(self, handle: Handle) -> None:
        directory = self.directory(handle.instance_id)
        temporary = directory / f".{FILE}"
        temporary.write_text(json.dumps(asdict(handle)))
        temporary.replace(directory / FILE)

    def read(self, instance_id: str) -> Handle | None:
        """The handle of an instance; None if it has none that can be used."""
        try:
            return _parse((self.directory(instance_id) / FILE).read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("instance.handle_damaged", instance_id=instance_id, error=repr(error))
            return None

    def all(self) -> list[Handle]:
        return [self.read(name) or self._empty(name) for name in sorted(self.names())]

    def _empty(self, instance_id: str) -> Handle:
        """Of a start that was interrupted, or whose handle cannot be read: nothing runs."""
        nothing: dict[str, str | int] = {
            "pid": 0, "started": -1, "child": 0, "child_started": -1, "boot": "",
            "workspace": instance_id,
        }  # fmt: skip
        return Handle(instance_id, self._kind, HANDLE_VERSION, nothing)


def _parse(text: str) -> Handle:
    handle = Handle(**json.loads(text))
    for name in ("pid", "started", "child", "child_started"):
        int(handle.data[name])
    for name in ("boot", "workspace"):
        handle.data[name]
    return handle
