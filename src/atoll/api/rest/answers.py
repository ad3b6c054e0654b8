"""
What answers look like.

They are written straight from the model by the functions below, one a noun, because validating our
own output again would cost more than the request itself; `schemas` describes them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from atoll.api.rest import path_encoding
from atoll.model import plan
from atoll.model.execution import RESULT_STATUS, Mode
from atoll.model.resources import format_cpu, format_size
from atoll.model.template import Build, Template
from atoll.service.executions.event_log import lines_of
from atoll.service.executions.mime import shaped
from atoll.service.executions.offload import shortened

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from atoll.model.checkpoint import Checkpoint
    from atoll.model.execution import Artifact, Attempt, Execution, Outcome
    from atoll.model.install import Install
    from atoll.model.invocation import Invocation
    from atoll.model.resources import Resources
    from atoll.model.session import Session
    from atoll.service.pool.service import PoolStatus

    Link = Callable[[str], str]
    """Where the file of a path is downloaded."""

NO_BUILD = Build()


def timestamp(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat().replace("+00:00", "Z")


def resources_out(resources: Resources) -> dict[str, Any]:
    return {
        "cpu": format_cpu(resources.cpu),
        "memory": format_size(resources.memory),
        "disk": format_size(resources.disk),
        "max_processes": resources.max_processes,
    }


def session_out(session: Session) -> dict[str, Any]:
    return {
        "id": session.id,
        "template_id": session.template_id,
        "status": session.status,
        "wanted": session.wanted,
        "observed": plan.observed(session),
        "runtime_type": session.runtime_type,
        "runtime_node": session.runtime_node,
        "container_id": session.instance_id,
        "pod_name": None,
        "resources": resources_out(session.resources),
        "env_vars": session.env_vars,
        "timeout": session.timeout,
        "capacity": session.capacity,
        "created_at": timestamp(session.created_at),
        "updated_at": timestamp(session.updated_at),
        "expires_at": timestamp(session.expires_at if session.rested_at is None else None),
        "ended_at": timestamp(session.ended_at),
        "cause": session.cause,
        "message": session.message,
        "template_version": session.template_version,
        "secrets": sorted(session.secrets),
        "volumes": [
            {"volume_id": mount.volume_id, "path": mount.path, "read_only": mount.read_only}
            for mount in session.volumes
        ],
        "workspace_mode": session.workspace_mode,
        "durability": session.durability,
        "started_from": session.started_from,
        "dependencies": None if session.install is None else install_out(session.install),
        "warnings": [
            {"code": warning.code, "message": warning.message} for warning in session.warnings
        ],
        "labels": session.labels,
        "node_labels": session.node_labels,
        "auto_start": session.auto_start,
        "idle_timeout": session.idle_timeout,
        "archive_after": session.archive_after,
        "delete_after": session.delete_after,
        "active_at": timestamp(session.active_at),
        "rested_at": timestamp(session.rested_at),
        "failures": session.failures,
        "retry_at": timestamp(session.retry_at),
    }


def checkpoint_out(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "session_id": checkpoint.id,
        "number": checkpoint.number,
        "created_at": timestamp(checkpoint.created_at),
        "files": checkpoint.files,
        "size": checkpoint.size,
        "kept_until": timestamp(checkpoint.kept_until),
    }


def install_out(install: Install) -> dict[str, Any]:
    return {
        "status": install.status,
        "requested": [dependency.requirement for dependency in install.dependencies],
        "installed": list(install.installed),
        "message": install.message,
    }


def submitted_out(execution: Execution) -> dict[str, Any]:
    return {
        "execution_id": execution.id,
        "invocation_id": execution.invocation_id,
        "status": "submitted",
        "submitted_at": timestamp(execution.created_at),
    }


def _text(data: bytes) -> str:
    """Bytes that are not UTF-8 become U+FFFD; NUL stays."""
    return data.decode("utf-8", "replace")


def _outcome_out(outcome: Outcome) -> dict[str, Any]:
    return {
        "stdout": _text(outcome.stdout),
        "stderr": _text(outcome.stderr),
        "exit_code": outcome.exit_code,
        "execution_time": outcome.execution_time,
        "return_value": None if outcome.return_json is None else json.loads(outcome.return_json),
        "results": _results(outcome),
        "metrics": outcome.metrics or None,
        "cause": outcome.cause,
        "signal": outcome.signal,
        "error": outcome.error,
        "stdout_truncated": outcome.stdout_size > len(outcome.stdout),
        "stdout_bytes": outcome.stdout_size,
        "stderr_truncated": outcome.stderr_size > len(outcome.stderr),
        "stderr_bytes": outcome.stderr_size,
        "artifacts_truncated": outcome.artifacts_truncated,
    }


def _results(outcome: Outcome) -> list[dict[str, Any]]:
    if outcome.results_json is None:
        return []
    return [shown for line in lines_of(outcome) if (shown := shaped(line)) is not None]


_NO_OUTCOME: dict[str, Any] = {
    "stdout": "",
    "stderr": "",
    "exit_code": None,
    "execution_time": None,
    "return_value": None,
    "results": [],
    "metrics": None,
    "cause": None,
    "signal": None,
    "error": None,
    "stdout_truncated": False,
    "stdout_bytes": 0,
    "stderr_truncated": False,
    "stderr_bytes": 0,
    "artifacts_truncated": False,
}


_SHOWN_AS = {
    "stdout": "stdout",
    "stderr": "stderr",
    "return_json": "return_value",
    "results_json": "results",
}


def _shortened(execution: Execution) -> list[str]:
    if not execution.kept:
        return []
    given = "command" if execution.request.code is None else "code"
    return [_SHOWN_AS.get(part, given) for part in shortened(execution)]


def result_out(execution: Execution, outcome: Outcome) -> dict[str, Any]:
    return {
        "execution_id": execution.id,
        "status": RESULT_STATUS[outcome.status],
        **_outcome_out(outcome),
        "artifacts": [path_encoding.shown(artifact.path) for artifact in outcome.artifacts],
        "shortened": [name for name in _shortened(execution) if name in _SHOWN_AS.values()],
    }


def status_out(execution: Execution) -> dict[str, Any]:
    return {
        "execution_id": execution.id,
        "session_id": execution.session_id,
        "status": execution.status,
        "cause": execution.outcome.cause if execution.outcome else None,
        "created_at": timestamp(execution.created_at),
        "completed_at": timestamp(execution.completed_at),
    }


def artifact_out(artifact: Artifact, link: Link | None = None) -> dict[str, Any]:
    return {
        "path": path_encoding.shown(artifact.path),
        "encoded_path": path_encoding.encoded(artifact.path),
        "size": artifact.size,
        "mime_type": artifact.mime_type,
        "type": artifact.type,
        "created_at": timestamp(artifact.created_at),
        "checksum": artifact.checksum,
        "download_url": None if link is None else link(artifact.path),
    }


def attempt_out(attempt: Attempt) -> dict[str, Any]:
    return {
        "started_at": timestamp(attempt.started_at),
        "ended_at": timestamp(attempt.ended_at),
        "node_id": attempt.node_id,
        "container_id": attempt.instance_id,
        "cause": attempt.cause,
        "message": attempt.message,
    }


def invocation_out(invocation: Invocation, execution: Execution | None = None) -> dict[str, Any]:
    outcome = None if execution is None else execution.outcome
    console = invocation.mode is Mode.CONSOLE
    return {
        "invocation_id": invocation.id,
        "execution_id": invocation.execution_id,
        "session_id": invocation.session_id,
        "function_name": invocation.function_name,
        "mode": invocation.mode,
        "status": invocation.status,
        "metadata": invocation.metadata,
        "created_at": timestamp(invocation.created_at),
        "completed_at": timestamp(invocation.completed_at),
        "result": None if execution is None or outcome is None else result_out(execution, outcome),
        "console_url": f"/api/v1/executions/{invocation.execution_id}/console" if console else None,
    }


def execution_out(
    execution: Execution, approval: dict[str, Any] | None = None, link: Link | None = None
) -> dict[str, Any]:
    request, outcome = execution.request, execution.outcome
    return {
        "id": execution.id,
        "invocation_id": execution.invocation_id,
        "session_id": execution.session_id,
        "container_id": execution.instance_id,
        "code": request.code,
        "language": request.language,
        "command": None if request.command is None else list(request.command),
        "function_name": request.function_name,
        "context_id": request.context_id,
        "timeout": request.timeout,
        "status": execution.status,
        **(_NO_OUTCOME if outcome is None else _outcome_out(outcome)),
        "artifacts": [] if outcome is None else [artifact_out(a, link) for a in outcome.artifacts],
        "shortened": _shortened(execution),
        "retry_count": execution.retry_count,
        "attempts": [attempt_out(attempt) for attempt in execution.attempts],
        "approval": None
        if approval is None
        else {name: approval.get(name) for name in ("id", "question", "data", "timeout")},
        "created_at": timestamp(execution.created_at),
        "started_at": timestamp(execution.started_at),
        "completed_at": timestamp(execution.completed_at),
    }


def template_out(template: Template) -> dict[str, Any]:
    build = template.build or NO_BUILD
    registry, image = template.registry, build.image
    return {
        "id": template.id,
        "name": template.name,
        "image": template.image,
        "base_image": template.base_image,
        "pre_installed_packages": list(build.python_packages),
        "default_resources": resources_out(template.default_resources),
        "security_context": {"require": list(template.require)},
        "python": template.python,
        "preload": list(template.preload),
        "env": template.env,
        "pool_size": template.pool_size,
        "pool_max": template.pool_max,
        "debian_packages": list(build.debian_packages),
        "python_packages": list(build.python_packages),
        "installed_packages": list(build.installed),
        "runtime": template.runtime,
        "dockerfile": template.dockerfile or None,
        "build_context": template.build_context,
        "registry": None if registry is None else {"server": registry.server},
        "image_digest": None if image is None else image.digest,
        "entrypoint": None if image is None else list(image.entrypoint),
        "command": None if image is None else list(image.command),
        "version": template.number,
        "status": template.status.value,
        "message": build.message,
        "attempts": build.attempts,
        "created_at": timestamp(template.created_at),
        "updated_at": timestamp(template.updated_at),
    }


def pool_out(state: PoolStatus) -> dict[str, Any]:
    outlook = state.outlook
    return {
        "template_id": outlook.template.id,
        "version": outlook.template.number,
        "ready": state.ready,
        "starting": state.starting,
        "others": state.others,
        "target": outlook.target,
        "wanted": outlook.wanted,
        "minimum": outlook.minimum,
        "maximum": outlook.maximum,
        "rate_per_minute": round(state.rate * 60, 2),
        "start_seconds": _rounded(state.start_seconds),
        "memory": state.memory,
        "hits": state.hits,
        "misses": state.misses,
        "oldest_seconds": _rounded(state.oldest_seconds),
        "limited_by": outlook.limited_by,
        "message": outlook.message,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
