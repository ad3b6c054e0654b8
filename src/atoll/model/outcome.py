"""Outcomes, derived from the reports of the executor, the kernel and the process itself."""

from __future__ import annotations

import mimetypes
import signal as signals
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from atoll.model.artifact import artifact_type
from atoll.model.execution import Artifact, ExecutionStatus, Outcome
from atoll.model.file_times import file_time
from atoll.model.session import Cause

if TYPE_CHECKING:
    from collections.abc import Mapping

EXIT_TIMEOUT = 124
EXIT_SIGNAL = 128

_REASONS: dict[str, tuple[ExecutionStatus, Cause, int | None, str]] = {
    "timeout": (
        ExecutionStatus.TIMEOUT,
        Cause.TIMEOUT,
        EXIT_TIMEOUT,
        "exceeded its timeout",
    ),
    "cancelled": (ExecutionStatus.CANCELLED, Cause.USER, EXIT_SIGNAL + 15, "was cancelled"),
    "memory": (ExecutionStatus.FAILED, Cause.OOM, EXIT_SIGNAL + 9, "exceeded its memory limit"),
    "disk": (
        ExecutionStatus.FAILED,
        Cause.DISK,
        EXIT_SIGNAL + 9,
        "exceeded its disk limit",
    ),
    "shutdown": (
        ExecutionStatus.CRASHED,
        Cause.EVICTED,
        None,
        "ended because its instance was shut down",
    ),
}


def conclude(
    raw: Mapping[str, Any],
    *,
    stdout: bytes,
    stderr: bytes,
    return_json: bytes | None,
    error: dict[str, Any] | None,
    out_of_memory: bool,
) -> Outcome:
    """
    The outcome of an attempt that ended; `raw` was checked by `atoll.link.messages`.

    What the process reported (`return_json`, `error`) counts only as far as it agrees with the
    kernel: the return value of a failed process is dropped.
    """
    reason, number = raw.get("reason"), raw.get("signal")
    name = None if number is None else _signal_name(int(number))
    exit_code: int | None = raw.get("exit_code")
    if exit_code == 0 and raw.get("error"):
        # The process succeeded, but its staged files could not be put in place.
        error = raw["error"]
    if reason in _REASONS:
        status, cause, exit_code, words = _REASONS[reason]
        error = {"code": cause.value, "message": f"The execution {words}."}
        if reason == "cancelled":
            error["code"] = "cancelled"
    elif out_of_memory and exit_code != 0:
        status, cause = ExecutionStatus.FAILED, Cause.OOM
        exit_code = EXIT_SIGNAL + 9 if exit_code is None else exit_code
        error = {"code": "oom", "message": "The execution exceeded its memory limit."}
    elif number is not None:
        status, cause, exit_code = ExecutionStatus.FAILED, Cause.SIGNAL, EXIT_SIGNAL + int(number)
        error = {"code": "signal", "message": f"The process was ended by {name}."}
    elif exit_code == 0 and error is None:
        status, cause = ExecutionStatus.COMPLETED, None
    else:
        status, cause = ExecutionStatus.FAILED, Cause.EXIT
        if error is None:
            error = {"code": "exit", "message": f"The process ended with exit code {exit_code}."}
    if status is not ExecutionStatus.COMPLETED:
        return_json = None
    usage, sizes = raw.get("usage", {}), raw.get("sizes", {})
    duration = float(raw.get("duration", 0.0))
    return Outcome(
        status=status,
        cause=cause,
        exit_code=exit_code,
        signal=name,
        error=error,
        stdout=stdout,
        stderr=stderr,
        stdout_size=int(sizes.get("1", len(stdout))),
        stderr_size=int(sizes.get("2", len(stderr))),
        return_json=return_json,
        execution_time=round(duration, 6),
        metrics={
            "duration_ms": round(duration * 1000, 3),
            "cpu_time_ms": round(float(usage.get("cpu", 0.0)) * 1000, 3),
            "peak_memory_mb": round(float(usage.get("peak", 0)) / 2**20, 3),
            "bytes_read": int(usage.get("read", 0)),
            "bytes_written": int(usage.get("written", 0)),
        },
        artifacts=tuple(_artifact(item) for item in raw.get("artifacts", ())),
        artifacts_truncated=bool(raw.get("artifacts_cut")),
    )


def without_result(
    status: ExecutionStatus,
    cause: Cause,
    message: str,
    *,
    code: str | None = None,
    stdout: bytes = b"",
    stderr: bytes = b"",
) -> Outcome:
    """The outcome of an execution without a result of its executor, with the output received."""
    return Outcome(
        status=status,
        cause=cause,
        exit_code=None,
        error={"code": code or cause.value, "message": message},
        stdout=stdout,
        stderr=stderr,
        stdout_size=len(stdout),
        stderr_size=len(stderr),
    )


def timed_out(*, stdout: bytes, stderr: bytes) -> Outcome:
    """The outcome of an execution that its executor did not end in time."""
    outcome = without_result(
        ExecutionStatus.TIMEOUT,
        Cause.TIMEOUT,
        "The execution exceeded its timeout. Its instance was ended, because the executor did not "
        "end the execution.",
        stdout=stdout,
        stderr=stderr,
    )
    return replace(outcome, exit_code=EXIT_TIMEOUT)


def _signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def _artifact(item: dict[str, Any]) -> Artifact:
    path = str(item["path"])
    return Artifact(
        path=path,
        size=int(item["size"]),
        mime_type=mimetypes.guess_type(path)[0] or "application/octet-stream",
        created_at=file_time(int(item["modified"])),
        checksum=item.get("sha256"),
        type=artifact_type(path),
    )
