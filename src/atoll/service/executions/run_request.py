"""The `run` request that an attempt sends to the executor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.model.workspace_path import working_directory
from atoll.service.executions.event_log import MAX_ARTIFACTS, MAX_RESULTS_SIZE

if TYPE_CHECKING:
    from atoll.drivers.base import Driver
    from atoll.model.execution import Execution
    from atoll.service.sessions.connections import Connection
    from atoll.service.sessions.provisioning import Provisioning
    from atoll.settings import Settings


class RunRequests:
    def __init__(self, driver: Driver, provisioning: Provisioning, settings: Settings) -> None:
        self._driver = driver
        self._provisioning = provisioning
        self._settings = settings.execution
        self._heartbeat = settings.link.heartbeat.total_seconds()

    async def make(self, connection: Connection, execution: Execution) -> dict[str, Any]:
        """Raises `PermanentError` if a secret of the session cannot be decrypted."""
        request, session, settings = execution.request, connection.session, self._settings
        await self._provisioning.prepare_variables(session)
        limits, watch = self._driver.limits.executor_limits(
            connection.instance.handle, session.resources
        )
        if request.context_id is None:
            variables = self._provisioning.variables(session)
        else:
            # The context got the session's variables when it was made, and may have changed them.
            # Packages may have been added since.
            variables = self._provisioning.package_variables(session)
        return {
            "id": execution.id,
            "kind": "command" if request.command is not None else request.language,
            "code": request.code,
            "command": request.command,
            "event": request.event,
            "stdin": request.stdin,
            "args": request.args,
            "env": {**variables, **request.env, **_request_variables(execution)},
            "cwd": working_directory(request.cwd),
            "timeout": request.timeout,
            "output_limit": settings.output_limit,
            "return_limit": settings.return_limit,
            "artifact_limit": MAX_ARTIFACTS,
            "limits": limits,
            "watch": watch,
            "capacity": session.capacity,
            "edition": session.version,
            "function": request.function_name,
            "body": request.body,
            "terminal": request.terminal,
            "stdin_open": request.stdin_open,
            "context": request.context_id,
            "approval_timeout": settings.approval_timeout.total_seconds(),
            "results_limit": MAX_RESULTS_SIZE,
            "heartbeat": self._heartbeat,
        }


def _request_variables(execution: Execution) -> dict[str, str]:
    """Variables by which code learns which request it runs for."""
    variables = {"ATOLL_EXECUTION_ID": execution.id, "ATOLL_SESSION_ID": execution.session_id}
    if execution.invocation_id is not None:
        variables["ATOLL_INVOCATION_ID"] = execution.invocation_id
    if execution.request.content_type is not None:
        variables["ATOLL_CONTENT_TYPE"] = execution.request.content_type
    return variables
