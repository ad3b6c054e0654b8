"""What a run leaves in the workspace: files that it staged, and artifacts."""

from __future__ import annotations

import os

from ..event_loop import READ, Loop
from . import artifacts
from .staging import Staging
from .workspace import Workspace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    Done = Callable[["dict[str, str] | None", list[dict[str, Any]], bool], None]
    """
    Called with the reason why staged files could not be moved, the artifacts, and whether the list
    is incomplete.
    """

SUCCESS, FAILURE, INTERRUPTED = "success", "failure", "interrupted"
"""How a run ended."""
HASHED_INLINE = 256 * 1024
"""Bytes of artifacts that are hashed in the loop; more are hashed in a thread."""


class Outputs:
    def __init__(self, loop: Loop, workspace: Workspace) -> None:
        self._loop = loop
        self._workspace = workspace
        self._staging = Staging(loop, workspace.path)
        self.scanner = artifacts.ArtifactScanner(workspace.path)

    def remove_remains(self) -> None:
        """Remove what runs of an earlier executor staged."""
        self._staging.clear()

    def make_staging(self, run_id: str) -> str:
        """The path of a new staging area; empty if user code prevents it."""
        return self._staging.make(run_id)

    def collect(
        self, run_id: str, started_ns: int, limit: int, end: str, in_use: bool, done: Done
    ) -> None:
        """
        Move staged files of a successful run into the workspace, and list what the run changed. Of
        an interrupted run, which may have left half-written files, none is listed. `in_use` means
        that the run may have left processes.
        """

        def staged(problem: dict[str, str] | None) -> None:
            # Listed in any case, so that these changes do not count as those of the next run.
            files, cut = self.scanner.changed_since(started_ns, limit)
            if end == INTERRUPTED:
                files, cut = [], False
            if files:
                self._hash(files, lambda: done(problem, files, cut))
            else:
                done(problem, files, cut)

        self._staging.settle(run_id, end == SUCCESS, in_use, staged)

    def _hash(self, files: list[dict[str, Any]], done: Callable[[], None]) -> None:
        if sum(item["size"] for item in files) <= HASHED_INLINE:
            artifacts.hash_files(self._workspace, files)
            done()
            return
        # The loop sees the end of the thread by a pipe.
        read, write = os.pipe2(os.O_CLOEXEC)

        def work() -> None:
            try:
                artifacts.hash_files(self._workspace, files)
            finally:
                os.close(write)

        def finished(mask: int) -> None:
            self._loop.remove(read)
            os.close(read)
            done()

        self._loop.add(read, READ, finished)
        import threading

        threading.Thread(target=work, daemon=True).start()
