"""Error messages with the right name for attributes that other sandbox libraries have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar


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
