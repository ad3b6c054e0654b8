"""What to run, and requests to a running execution."""

from __future__ import annotations

import base64
import json
from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from atoll.api.rest.schemas.base import RequestBody
from atoll.api.rest.schemas.types import Argument, Base64, Env, Id, Json, Path, Reason
from atoll.model.execution import Language, Mode, Request

MAX_SOURCE = 4 * 1024 * 1024
"""Characters of code, and of stdin given with it."""
MAX_APPROVAL_ANSWER = 32 * 1024
"""Bytes as JSON. The event log has an entry with each answer."""
MAX_STDIN = 1024 * 1024
"""Bytes that an executor accepts at once."""
MAX_MESSAGE = 64 * 1024
"""Bytes that an executor accepts at once."""


class Work(RequestBody):
    """What to run: `code` (in `language`) or `command`."""

    code: Annotated[str, StringConstraints(max_length=MAX_SOURCE)] | None = None
    language: Language = Language.PYTHON
    command: Annotated[list[Argument], Field(min_length=1, max_length=1024)] | None = None
    stdin: Annotated[str, StringConstraints(max_length=MAX_SOURCE)] | None = None
    stdin_open: bool = Field(
        False, description="Keep stdin open after `stdin`, for input that is injected later."
    )
    env: Env = Field({})
    args: Annotated[list[Argument], Field(max_length=1024)] = Field([])
    cwd: Path | None = Field(
        None,
        description="Working directory: relative to /workspace, which is the default, or an "
        "absolute path in the session.",
    )
    execution_id: Id | None = Field(
        None, description="An id of your own. A repeated request with it does not run again."
    )
    context_id: Id | None = Field(None, description="The stateful context to run the code in.")

    @field_validator("command")
    @classmethod
    def _names_a_program(cls, command: list[str] | None) -> list[str] | None:
        if command is not None and not command[0]:
            raise ValueError("the first item is the program and cannot be empty")
        return command

    @model_validator(mode="after")
    def _context_runs_code(self) -> Self:
        if self.context_id is not None and self.code is None:
            raise ValueError("context_id: a context runs code, not a command")
        return self

    def _request(self, **more: Any) -> Request:
        return Request(
            code=self.code,
            language=self.language if self.command is None else None,
            command=None if self.command is None else tuple(self.command),
            stdin_open=self.stdin_open,
            args=tuple(self.args),
            env=self.env,
            cwd=self.cwd,
            context_id=self.context_id,
            **more,
        )


class Execute(Work):
    """Either `code` (in `language`) or `command`."""

    timeout: float | None = Field(None, gt=0, description="Seconds.")
    event: Json = Field(default_factory=dict, description="Argument of `handler`.")
    wait: float | None = Field(
        None,
        ge=0,
        description="Seconds to wait for the result, which is then the response.",
    )

    @model_validator(mode="after")
    def _code_or_command(self) -> Self:
        if (self.code is None) == (self.command is None):
            raise ValueError("code: give either code or command")
        return self

    def request(self, default_timeout: float) -> Request:
        return self._request(
            event=self.event,
            stdin=self.stdin,
            timeout=self.timeout or default_timeout,
            mode=Mode.SYNC if self.wait else Mode.ASYNC,
        )


class Cancel(RequestBody):
    reason: Reason | None = None


class Inject(RequestBody):
    """Either a `message`, which the code reads with `messages()`, or more input for its stdin."""

    message: Annotated[str, StringConstraints(max_length=MAX_MESSAGE)] | None = None
    stdin: Annotated[str, StringConstraints(max_length=MAX_STDIN)] | None = None
    stdin_base64: (
        Annotated[str, StringConstraints(max_length=-(-MAX_STDIN // 3) * 4), Base64] | None
    ) = None
    eof: bool = Field(False, description="Close stdin afterwards.")

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [self.message, self.stdin, self.stdin_base64]
        count = sum(value is not None for value in given)
        if count > 1 or (count == 0 and not self.eof):
            raise ValueError("message: give exactly one of message, stdin and stdin_base64")
        if self.message is not None and self.eof:
            raise ValueError("eof: a message does not close stdin")
        if self._size(self.message) > MAX_MESSAGE:
            raise ValueError(f"message: at most {MAX_MESSAGE} bytes")
        if self._size(self.stdin) > MAX_STDIN:
            raise ValueError(f"stdin: at most {MAX_STDIN} bytes in one request")
        return self

    @staticmethod
    def _size(text: str | None) -> int:
        return 0 if text is None else len(text.encode("utf-8", "surrogatepass"))

    @property
    def data(self) -> str:
        """The input for stdin, as base64."""
        if self.stdin_base64 is not None:
            return self.stdin_base64
        return base64.b64encode((self.stdin or "").encode("utf-8", "surrogatepass")).decode()


class Resume(RequestBody):
    """A person's answer to the question that the execution asks."""

    approved: bool
    answer: Any = None
    reason: Reason | None = None
    approval_id: Id | None = Field(
        None, description="Which question is answered; refused if another one is open."
    )

    @field_validator("answer")
    @classmethod
    def _is_short_json(cls, answer: Any) -> Any:
        if len(json.dumps(answer, allow_nan=False)) > MAX_APPROVAL_ANSWER:
            raise ValueError(f"at most {MAX_APPROVAL_ANSWER} bytes of JSON")
        return answer
