"""
Derives Python declarations of the SDK from the OpenAPI document: the value `SessionInfo`, and a
`TypedDict` with the keyword options of each call that creates, changes or runs something.

A field of the API appears in the SDK without any change here. The tables below list only where the
SDK differs from the wire on purpose: friendlier names and types, and texts that Python users need.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any, NamedTuple

Schema = dict[str, Any]


class Option(NamedTuple):
    """One keyword of a call: its type, its text, its name on the wire, and what encodes it."""

    name: str
    kind: str
    text: str
    wire_name: str
    encoder: str


@dataclass(frozen=True)
class Options:
    """One `TypedDict`: the properties of `schema` without those in `omit`."""

    name: str
    schema: str
    omit: frozenset[str]
    text: str


RUN_ELSEWHERE = frozenset({"code", "context_id", "wait"})
OPTIONS = (
    Options(
        "CreateOptions",
        "CreateSession",
        frozenset({"template_id", "resources"}),
        "Options of `sessions.create` and `atoll.session`. Omitted ones take the values of the "
        "template, then those of the server's settings.",
    ),
    Options(
        "UpdateOptions",
        "UpdateSession",
        frozenset({"resources"}),
        "Options of `session.update` and `session.clone`. What is omitted stays unchanged.",
    ),
    Options(
        "RunOptions",
        "Execute",
        RUN_ELSEWHERE,
        "Options of `session.run`, `session.stream` and `session.submit`.",
    ),
    Options(
        "ContextRunOptions",
        "Execute",
        RUN_ELSEWHERE | {"language", "command", "event", "args", "cwd", "stdin_open"},
        "Options of `context.run` and `context.submit`.",
    ),
    Options(
        "InvokeOptions",
        "Invoke",
        frozenset(
            {"session_id", "function_name", "mode", "input", "input_base64", "context_id"}
            | {"wait_ms", "terminal"}
        ),
        "Options of `session.invoke`.",
    ),
    Options(
        "TemplateOptions",
        "TemplateIn",
        frozenset({"name", "pre_installed_packages"}),
        "Options of `templates.create` and `templates.update`.",
    ),
)

PACKAGES = "packages"
"""The encoder that is not in `arguments`."""
_QUANTITIES = (
    Option("cpu", "str | float | None", 'Cores, like `1`, `0.5` or `"500m"`.', "cpu", "quantity"),
    Option("memory", "str | int | None", 'In bytes, or like `"512Mi"`.', "memory", "quantity"),
    Option("disk", "str | int | None", "Workspace size, like memory.", "disk", "quantity"),
)
FRIENDLIER: dict[str, tuple[Option, ...]] = {
    "CreateSession": (
        *_QUANTITIES,
        Option(
            "env",
            "Mapping[str, str] | None",
            "Environment variables.",
            "env_vars",
            "string_dict",
        ),
        Option("volumes", "Sequence[Mount]", "Volumes to mount.", "volumes", "mounts"),
        Option(
            "dependencies",
            "str | Sequence[str | Mapping[str, str]]",
            'Python packages for this session, like `"requests"` or `"pandas>=2,<3"`.',
            "dependencies",
            PACKAGES,
        ),
    ),
    "UpdateSession": (
        *_QUANTITIES,
        Option(
            "env",
            "Mapping[str, str | None] | None",
            "Environment variables to add; None removes one.",
            "env_vars",
            "nullable_string_dict",
        ),
    ),
    "Invoke": (
        Option(
            "timeout",
            "float | None",
            "Seconds that the code may run.",
            "timeout_ms",
            "milliseconds",
        ),
    ),
    "ResourcesIn": _QUANTITIES,
    "TemplateIn": (
        Option(
            "registry",
            "Mapping[str, str] | None",
            "Credentials for pulling: `username` and `password`, or `identity_token`; with a "
            "Dockerfile also the `server`.",
            "registry",
            "string_dict",
        ),
        Option(
            "require",
            "Sequence[str] | None",
            "Isolation that a node must provide.",
            "security_context",
            "requirements",
        ),
        Option(
            "context",
            "str | os.PathLike[str] | None",
            "Local directory with the files that the Dockerfile copies. Files that its "
            "`.dockerignore` excludes are not sent.",
            "build_context",
            "unchecked",
        ),
    ),
}
"""Options with another name, type or notation than on the wire, by schema."""

TEXTS = {
    ("CreateSession", "timeout"): "Lifetime in seconds.",
    ("UpdateSession", "timeout"): "New lifetime in seconds, counted from now.",
    ("CreateSession", "labels"): "Labels of your own. The API returns them.",
    ("CreateSession", "max_processes"): "Processes and threads.",
    ("UpdateSession", "labels"): "Labels to add; None removes one.",
    ("UpdateSession", "max_processes"): "Processes and threads.",
    ("ResourcesIn", "max_processes"): "Processes and threads.",
    ("Execute", "language"): "Language of the code: python (the default), javascript or shell.",
    ("Execute", "command"): "Command to run instead of code: the program and its arguments.",
    ("Execute", "event"): "Passed to `handler(event)`.",
    ("Execute", "timeout"): "Seconds that the code may run.",
    ("Execute", "stdin"): "Text for the program's standard input.",
    ("Execute", "env"): "Environment variables for this execution.",
    ("Execute", "args"): "Command-line arguments of the code.",
    ("Invoke", "code"): "Code that defines the function, or to run if no function is named.",
    ("Invoke", "language"): "Language of the code: python (the default), javascript or shell.",
    ("Invoke", "command"): "Command to run instead of code: the program and its arguments.",
    ("Invoke", "stdin"): "Text for the program's standard input.",
    ("Invoke", "env"): "Environment variables for this execution.",
    ("Invoke", "args"): "Command-line arguments of the code.",
    ("Invoke", "content_type"): "Media type of `input`.",
    ("TemplateIn", "preload"): "Modules that the interpreter imports before code arrives.",
    ("TemplateIn", "env"): "Environment variables.",
    ("SessionOut", "status"): "Current state: creating, starting, restoring, running, pausing, "
    "paused, stopping, stopped, archiving, archived or error; or how the session ended: completed, "
    "failed, timeout or terminated.",
    ("SessionOut", "wanted"): "Requested state: running, paused, stopped, archived or destroyed.",
    ("SessionOut", "cause"): "Why the session ended, was stopped, or is in `error`.",
    ("SessionOut", "stale"): "True if the server's database is unavailable and this is the last "
    "known state.",
}
"""For fields that the API leaves without a description, or describes in its own notation."""

VALUE_OF = {
    "ResourcesOut": "Limits",
    "InstallOut": "Packages",
    "WarningOut": "Notice",
    "VolumeMountOut": "Mount",
}
REQUIRED = {
    "id",
    "template_id",
    "status",
    "wanted",
    "runtime_type",
    "runtime_node",
    "resources",
    "timeout",
    "created_at",
    "updated_at",
    "expires_at",
}
"""Fields that every server has sent since the first release; the others have defaults."""
DEFAULTS = {
    "capacity": "1",
    "template_version": "1",
    "auto_start": "True",
    "workspace_mode": '"sync"',
    "durability": '"background"',
}


def text_of(schema: str, field: str, declared: Schema) -> str:
    return TEXTS.get((schema, field)) or str(declared.get("description", ""))


def documented(line: str, text: str) -> list[str]:
    """A declaration with its text below it."""
    if not text:
        return [f"    {line}"]
    if len(text) <= 84:
        return [f"    {line}", f'    """{text}"""']
    wrapped = textwrap.wrap(text, 96, break_on_hyphens=False)
    return [f"    {line}", '    """', *(f"    {part}" for part in wrapped), '    """']


# Keyword options


def options_module(document: Schema) -> str:
    schemas = document["components"]["schemas"]
    lines = [
        '"""',
        "Keyword options of the client's calls, and how each is encoded in the body of a request.",
        "",
        "Generated by scripts/generate-sync from the OpenAPI document.",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        "from typing import TYPE_CHECKING, Any, TypedDict",
        "",
        "from atoll.sdk.arguments import Fields, "
        + ", ".join(sorted(_encoders(schemas) - {PACKAGES})),
        f"from atoll.sdk.dependencies import {PACKAGES}",
        "",
        "if TYPE_CHECKING:",
        "    import os",
        "    from collections.abc import Mapping, Sequence",
        "",
        "    from atoll.sdk.values import Mount",
        "",
    ]
    for options in OPTIONS:
        found = options_of(schemas, options.schema, options.omit)
        lines += [f"class {options.name}(TypedDict, total=False):"]
        lines += [f'    """{options.text}"""' if len(options.text) < 90 else ""]
        if len(options.text) >= 90:
            wrapped = textwrap.wrap(options.text, 96)
            lines[-1:] = ['    """', *(f"    {part}" for part in wrapped), '    """']
        lines += [""]
        for option in found:
            lines += documented(f"{option.name}: {option.kind}", option.text)
        lines += ["", f"{constant(options.name)}: Fields = {{"]
        lines += [f'    "{o.name}": ("{o.wire_name}", {o.encoder}),' for o in found]
        lines += ["}", ""]
    return "\n".join(lines)


def constant(name: str) -> str:
    """`CREATE_FIELDS` for `CreateOptions`."""
    words = "".join(f"_{c}" if c.isupper() else c for c in name.removesuffix("Options"))
    return f"{words.lstrip('_').upper()}_FIELDS"


def _encoders(schemas: dict[str, Schema]) -> set[str]:
    return {
        option.encoder
        for options in OPTIONS
        for option in options_of(schemas, options.schema, options.omit)
    }


def options_of(schemas: dict[str, Schema], schema: str, omit: frozenset[str]) -> list[Option]:
    found = []
    for field in schemas[schema]["properties"]:
        if field == "default_resources":
            found += options_of(schemas, "ResourcesIn", frozenset())
        elif field not in omit:
            friendlier = {option.wire_name: option for option in FRIENDLIER.get(schema, ())}
            found.append(friendlier.get(field) or _option(schemas, schema, field))
    return found


def _option(schemas: dict[str, Schema], schema: str, field: str) -> Option:
    declared = schemas[schema]["properties"][field]
    kind, encoder = _kind_and_encoder(declared)
    explained = schemas["CreateSession"]["properties"].get(field)
    if schema == "UpdateSession" and explained and (schema, field) not in TEXTS:
        schema, declared = "CreateSession", explained
    return Option(field, kind, text_of(schema, field, declared), field, encoder)


def _kind_and_encoder(declared: Schema) -> tuple[str, str]:
    inner = _without_null(declared)
    if "$ref" in inner:  # an enumeration
        return "str | None", "string"
    match inner.get("type"):
        case "string":
            return "str | None", "string"
        case "integer":
            return "int | None", "number"
        case "number":
            return "float | None", "number"
        case "boolean":
            return "bool | None", "unchecked"
        case "array":
            return "Sequence[str] | None", "string_list"
        case "object":
            values = [*inner.get("patternProperties", {}).values()]
            if any("anyOf" in value for value in values):
                return "Mapping[str, str | None] | None", "nullable_string_dict"
            return "Mapping[str, str] | None", "string_dict"
    return "Any", "unchecked"


def _without_null(declared: Schema) -> Schema:
    for inner in declared.get("anyOf", ()):
        if inner != {"type": "null"}:
            return dict(inner)
    return declared


# Values


def session_info_module(document: Schema) -> str:
    properties = document["components"]["schemas"]["SessionOut"]["properties"]
    # Last, because it describes the response rather than the session.
    properties["stale"] = properties.pop("stale")
    required: list[str] = []
    optional: list[str] = []
    for field, declared in properties.items():
        kind = _value_kind(declared)
        text = text_of("SessionOut", field, declared)
        if field in REQUIRED:
            required += documented(f"{field}: {kind}", text)
        else:
            optional += documented(f"{field}: {kind} = {_default(field, kind)}", text)
    values = ", ".join(sorted(VALUE_OF.values()))
    return "\n".join(
        [
            '"""',
            "A session.",
            "",
            "Generated by scripts/generate-sync from the OpenAPI document.",
            '"""',
            "",
            "from __future__ import annotations",
            "",
            "from dataclasses import dataclass, field",
            "from datetime import datetime  # noqa: TC003 - `decode` reads the annotations",
            "",
            f"from atoll.sdk.values.sessions import {values}  # noqa: TC001",
            "",
            "",
            "@dataclass(frozen=True, slots=True, repr=False)",
            "class SessionInfo:",
            '    """A session as the server returned it."""',
            "",
            *required,
            *optional,
            "",
            "    def __repr__(self) -> str:",
            '        where = f"{self.template_id} on {self.runtime_node}"',
            '        return f"<SessionInfo {self.id} {self.status}, {where}>"',
            "",
        ]
    )


def _value_kind(declared: Schema) -> str:
    inner = _without_null(declared)
    suffix = "" if inner is declared else " | None"
    if "$ref" in inner:
        return VALUE_OF.get(inner["$ref"].rpartition("/")[2], "str") + suffix
    match inner.get("type"):
        case "string":
            kind = "datetime" if inner.get("format") == "date-time" else "str"
        case "array":
            kind = f"tuple[{_value_kind(inner['items'])}, ...]"
        case "object":
            kind = f"dict[str, {_value_kind(inner['additionalProperties'])}]"
        case other:
            kind = {"integer": "int", "number": "float", "boolean": "bool"}[str(other)]
    return kind + suffix


def _default(field: str, kind: str) -> str:
    if field in DEFAULTS:
        return DEFAULTS[field]
    if kind.endswith("| None"):
        return "None"
    if kind.startswith("dict"):
        return "field(default_factory=dict)"
    if kind.startswith("tuple"):
        return "()"
    return {"int": "0", "float": "0.0", "bool": "False", "str": '""'}[kind]
