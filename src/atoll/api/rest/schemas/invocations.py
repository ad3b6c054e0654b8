"""Invocations: functions, code or commands, run under an id that survives retries."""

from __future__ import annotations

import base64
import json
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from atoll.api.rest.schemas.base import GIVEN, From, Page, RequestBody, ResponseBody, encoder_of
from atoll.api.rest.schemas.execution_requests import Work
from atoll.api.rest.schemas.executions import ResultOut, result_out
from atoll.api.rest.schemas.types import Base64, Id, Json
from atoll.model.execution import Execution, Language, Mode, Request
from atoll.model.invocation import Invocation

FUNCTION = r"^([A-Za-z_][A-Za-z0-9_.]*:)?[A-Za-z_][A-Za-z0-9_]*$"
MAX_MS = 2**53
"""Numbers beyond it are not exact in JSON; the server's own limits are far lower."""
MAX_METADATA = 8 * 1024
"""Bytes of an invocation's metadata as JSON: they are stored in its row."""


class Terminal(RequestBody):
    rows: int = Field(24, ge=1, le=65_535)
    cols: int = Field(80, ge=1, le=65_535)


class Invoke(Work):
    """
    What to run: a function in `code` or, as `module:name`, in the workspace; or `code` or `command`
    without a function.
    """

    session_id: Id
    function_name: Annotated[str, StringConstraints(pattern=FUNCTION, max_length=255)] | None = (
        Field(None, description="A function in `code`; without code, `module:name`.")
    )
    mode: Mode = Mode.SYNC
    invocation_id: Id | None = Field(
        None, description="An id of your own. A repeated request with it is the same invocation."
    )
    timeout_ms: int | None = Field(None, ge=1, le=MAX_MS, description="Milliseconds.")
    input: Json = Field(
        None,
        description="JSON argument of the function. Without `function_name` it is written to stdin "
        "and passed to `handler`.",
    )
    input_base64: Annotated[str, StringConstraints(max_length=6 * 1024 * 1024), Base64] | None = (
        Field(None, description="Bytes instead of JSON, used like `input`.")
    )
    content_type: Annotated[str, StringConstraints(max_length=255, pattern=r"^[!-~ ]+$")] | None = (
        None
    )
    metadata: Annotated[
        dict[
            Annotated[str, StringConstraints(min_length=1, max_length=128)],
            Annotated[str, StringConstraints(max_length=4096)],
        ],
        Field(max_length=64, description=f"At most {MAX_METADATA} bytes as JSON."),
    ] = Field({})
    wait_ms: int | None = Field(
        None,
        ge=0,
        le=MAX_MS,
        description="Milliseconds that mode `sync` waits, at most the setting "
        "`execution.max_wait`.",
    )
    terminal: Terminal | None = Field(
        None,
        description="Run on a terminal of this size. Mode `console` runs on one of 24 rows and 80 "
        "columns by default, or on pipes with `stdin_open`.",
    )

    @field_validator("metadata")
    @classmethod
    def _is_short(cls, metadata: dict[str, str]) -> dict[str, str]:
        if metadata and len(json.dumps(metadata)) > MAX_METADATA:
            raise ValueError(f"at most {MAX_METADATA} bytes as JSON")
        return metadata

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.code is not None and self.command is not None:
            raise ValueError("command: give either code or command, not both")
        if self.command is not None and self.function_name is not None:
            raise ValueError("function_name: a command has no functions")
        if self.code is None and self.command is None:
            if self.function_name is None:
                raise ValueError("code: give function_name, code or command")
            if ":" not in self.function_name:
                raise ValueError("function_name: without code it has the form module:name")
        elif self.function_name is not None and ":" in self.function_name:
            raise ValueError("function_name: give either code or module:name")
        if self.function_name is not None and self.language is not Language.PYTHON:
            raise ValueError("function_name: functions are supported in Python only")
        if self._has_json and self.input_base64 is not None:
            raise ValueError("input_base64: give either input or input_base64, not both")
        if self.content_type is not None and not self._has_input:
            raise ValueError("content_type: needs input or input_base64")
        if self.function_name is None and self.stdin is not None and self._has_input:
            raise ValueError(
                "stdin: without function_name the input is written to stdin; give either of them"
            )
        if self._on_terminal:
            for name in ("stdin", "context_id"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}: not supported on a terminal")
            if self._has_input and self.function_name is None:
                raise ValueError("input: not supported on a terminal; send it over the console")
        return self

    @property
    def _has_json(self) -> bool:
        """Whether `input` is given, null included."""
        return "input" in self.model_fields_set

    @property
    def _has_input(self) -> bool:
        return self._has_json or self.input_base64 is not None

    @property
    def _runs_python(self) -> bool:
        return self.command is None and self.language is Language.PYTHON

    @property
    def _on_terminal(self) -> bool:
        return self.terminal is not None or (self.mode is Mode.CONSOLE and not self.stdin_open)

    def request(self, default_timeout: float) -> Request:
        stdin, body = self.stdin, self.input_base64
        if self._has_input and self.function_name is None:
            raw = base64.b64decode(body) if body is not None else json.dumps(self.input).encode()
            stdin = raw.decode("utf-8", "surrogateescape")
            if not self._runs_python:
                body = None
        terminal = (self.terminal or Terminal()) if self._on_terminal else None
        content_type = self.content_type
        if content_type is None and self._has_input:
            is_json = self.input_base64 is None
            content_type = "application/json" if is_json else "application/octet-stream"
        return self._request(
            event=self.input if self._has_json else {},
            stdin=stdin,
            timeout=default_timeout if self.timeout_ms is None else self.timeout_ms / 1000,
            function_name=self.function_name,
            body=body,
            content_type=content_type,
            terminal=None if terminal is None else (terminal.rows, terminal.cols),
            mode=self.mode,
            metadata=self.metadata,
        )


def _console_url(invocation: Invocation) -> str | None:
    if invocation.mode is not Mode.CONSOLE:
        return None
    return f"/api/v1/executions/{invocation.execution_id}/console"


class InvocationOut(ResponseBody, of=Invocation):
    invocation_id: Annotated[str, From("id")]
    execution_id: str = Field(description="Its latest execution.")
    session_id: str
    function_name: str | None
    mode: Literal["sync", "async", "stream", "console"]
    status: Literal["accepted", "running", "succeeded", "failed", "cancelled"]
    metadata: dict[str, str]
    created_at: datetime
    completed_at: datetime | None
    result: Annotated[ResultOut | None, GIVEN]
    console_url: Annotated[str | None, From(_console_url)] = Field(
        description="The WebSocket of its terminal, in mode `console`."
    )


class InvocationPage(Page[InvocationOut]):
    pass


_encode = encoder_of(InvocationOut)


def invocation_out(invocation: Invocation, execution: Execution | None = None) -> dict[str, Any]:
    outcome = None if execution is None else execution.outcome
    result = None if execution is None or outcome is None else result_out(execution, outcome)
    return _encode(invocation, result=result)
