"""
Help for people at a prompt or in a notebook: signatures with all options, and hints for attributes
that have another name in other sandbox libraries.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def show_options(function: F) -> F:
    """
    Expand `**options: Unpack[…]` in the signature that `help()` and notebooks show. Type checkers
    and editors do that themselves.
    """
    from atoll.sdk import options

    kind = function.__annotations__["options"].removeprefix("Unpack[").removesuffix("]")
    signature = inspect.signature(function)
    named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    named += [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=annotation.__forward_arg__,
        )
        for name, annotation in getattr(options, kind).__annotations__.items()
    ]
    function.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    return function


class AttributeHints:
    """Suggests an alternative in the error for a missing attribute."""

    ALTERNATIVES: ClassVar[dict[str, str]] = {}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in self.ALTERNATIVES:
                message += f". Use {self.ALTERNATIVES[name]}."
            raise AttributeError(message, name=name, obj=self)


SESSION_ALTERNATIVES = {
    "close": "delete(), or `with`",
    "commands": "run(command=[…])",
    "destroy": "delete()",
    "exec": "run(command=[…])",
    "execute": "run(code)",
    "filesystem": "files",
    "fs": "files",
    "get_host": "files.presign(…) for files; ports are not reachable from outside",
    "get_info": "refresh()",
    "is_running": "refresh().status",
    "kill": "delete()",
    "notebook": "context()",
    "process": "run(command=[…]), or processes()",
    "run_code": "run(code), or context().run(code) to keep variables",
    "run_command": "run(command=[…])",
    "sandbox_id": "id",
    "set_timeout": "extend(seconds)",
    "terminate": "delete()",
    "upload": "files.upload(…)",
    "write_file": "files.write(…)",
}
CLIENT_ALTERNATIVES = {
    "create": "session(), or sessions.create()",
    "create_sandbox": "session(), or sessions.create()",
    "create_session": "session(), or sessions.create()",
    "run": "session() first, then run() of that",
    "run_code": "session() first, then run() of that",
    "sandbox": "session()",
}
