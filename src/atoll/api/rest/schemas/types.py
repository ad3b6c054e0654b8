"""Types of fields that several requests share."""

from __future__ import annotations

import base64
import json
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints

from atoll.api.rest.path_encoding import percent_decoded
from atoll.api.rest.schemas.base import RequestBody
from atoll.model.session import MAX_ENV_VARS, MAX_LABELS

NO_NUL = r"^[^\x00]*$"
ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,254}$"
EnvName = Annotated[str, StringConstraints(pattern=ENV_NAME)]
EnvValue = Annotated[str, StringConstraints(max_length=32_768, pattern=NO_NUL)]
Env = Annotated[dict[EnvName, EnvValue], Field(max_length=MAX_ENV_VARS)]
EnvChanges = Annotated[dict[EnvName, EnvValue | None], Field(max_length=MAX_ENV_VARS)]
Label = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?$")
]
LabelValue = Annotated[str, StringConstraints(max_length=255)]
Labels = Annotated[dict[Label, LabelValue], Field(max_length=MAX_LABELS)]
LabelChanges = Annotated[dict[Label, LabelValue | None], Field(max_length=MAX_LABELS)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Id = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Argument = Annotated[str, StringConstraints(max_length=131_071, pattern=NO_NUL)]
Path = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=NO_NUL)]
Reason = Annotated[str, StringConstraints(max_length=1000)]


class EncodedPath(RequestBody):
    """A path with bytes that are not UTF-8."""

    encoded: Annotated[str, StringConstraints(min_length=1, max_length=12_288)] = Field(
        description="Percent-encoded, like `encoded_path` in responses.", examples=["a%FF"]
    )


PathIn = Path | EncodedPath


def path_of(given: str | EncodedPath) -> str:
    return given if isinstance(given, str) else percent_decoded(given.encoded)


def _check_base64(text: str) -> str:
    try:
        base64.b64decode(text, validate=True)
    except ValueError:
        raise ValueError("this is not base64") from None
    return text


Base64 = AfterValidator(_check_base64)


def _check_json(value: Any) -> Any:
    if value:
        # The parser accepts NaN and Infinity, which JSON does not have.
        try:
            json.dumps(value, allow_nan=False)
        except RecursionError:
            raise ValueError("this is nested too deeply") from None
    return value


Json = Annotated[Any, AfterValidator(_check_json)]
