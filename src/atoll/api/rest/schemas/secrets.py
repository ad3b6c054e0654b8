"""Secrets of a session. Their values are never returned."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr

from atoll.api.rest.schemas.base import RequestBody, ResponseBody
from atoll.service.sessions.secrets import MAX_SECRET


def _fits_a_variable(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    if "\0" in text:
        raise ValueError("an environment variable cannot contain NUL")
    if len(text.encode("utf-8", "surrogatepass")) > MAX_SECRET:
        raise ValueError(f"at most {MAX_SECRET} bytes")
    return value


SecretValue = Annotated[SecretStr, AfterValidator(_fits_a_variable)]
"""Hidden in the representation of a request, in errors and in tracebacks."""


class SecretIn(RequestBody):
    value: SecretValue = Field(json_schema_extra={"writeOnly": True})


class SecretNames(ResponseBody):
    """Values are never returned."""

    items: list[str]
    next_cursor: str | None
