"""
The public names of Atoll.

Each is imported on first use, so that `import atoll` is fast and loads no HTTP client. Every module
of the package pays for this import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.errors import (
        AtollError,
        Conflict,
        Forbidden,
        InvalidRequest,
        NotFound,
        PermanentError,
        RequestError,
        TemporaryError,
        TooLarge,
        Unauthenticated,
    )
    from atoll.sdk.client import AsyncAtoll
    from atoll.sdk.consoles import AsyncConsole
    from atoll.sdk.contexts import AsyncContext
    from atoll.sdk.displays import Display
    from atoll.sdk.executions import AsyncExecution
    from atoll.sdk.invocations import AsyncInvocation
    from atoll.sdk.session import AsyncSession
    from atoll.sdk.sync import Atoll, Console, Context, Execution, Invocation, Session
    from atoll.sdk.values import (
        Answer,
        Approval,
        ConsoleEvent,
        ConsoleExit,
        Event,
        ExecutionFailed,
        FeedEvent,
        Mount,
        Result,
    )
    from atoll.sdk.webhook_signature import verify_webhook
    from atoll.version import __version__

__all__ = [
    "Answer",
    "Approval",
    "AsyncAtoll",
    "AsyncConsole",
    "AsyncContext",
    "AsyncExecution",
    "AsyncInvocation",
    "AsyncSession",
    "Atoll",
    "AtollError",
    "Conflict",
    "Console",
    "ConsoleEvent",
    "ConsoleExit",
    "Context",
    "Display",
    "Event",
    "Execution",
    "ExecutionFailed",
    "FeedEvent",
    "Forbidden",
    "InvalidRequest",
    "Invocation",
    "Mount",
    "NotFound",
    "PermanentError",
    "RequestError",
    "Result",
    "Session",
    "TemporaryError",
    "TooLarge",
    "Unauthenticated",
    "__version__",
    "verify_webhook",
]

_HOME = {
    "Answer": "atoll.sdk.values",
    "Approval": "atoll.sdk.values",
    "AsyncAtoll": "atoll.sdk.client",
    "AsyncConsole": "atoll.sdk.consoles",
    "AsyncExecution": "atoll.sdk.executions",
    "AsyncInvocation": "atoll.sdk.invocations",
    "AsyncSession": "atoll.sdk.session",
    "Atoll": "atoll.sdk.sync",
    "Console": "atoll.sdk.sync",
    "ConsoleEvent": "atoll.sdk.values",
    "ConsoleExit": "atoll.sdk.values",
    "AsyncContext": "atoll.sdk.contexts",
    "Context": "atoll.sdk.sync",
    "Display": "atoll.sdk.displays",
    "Event": "atoll.sdk.values",
    "Execution": "atoll.sdk.sync",
    "ExecutionFailed": "atoll.sdk.values",
    "FeedEvent": "atoll.sdk.values",
    "Invocation": "atoll.sdk.sync",
    "Mount": "atoll.sdk.values",
    "Result": "atoll.sdk.values",
    "Session": "atoll.sdk.sync",
    "__version__": "atoll.version",
    "verify_webhook": "atoll.sdk.webhook_signature",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'atoll' has no attribute {name!r}")
    value = getattr(import_module(_HOME.get(name, "atoll.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
