"""What requests may say. Checked by pydantic; fields that are not named here are refused."""

from __future__ import annotations

import base64
import json
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    field_validator,
    model_validator,
)

from atoll.api.rest.path_encoding import decoded
from atoll.drivers.base import RegistryAuth
from atoll.model.execution import Language, Mode, Request
from atoll.model.image import SERVER
from atoll.model.install import Dependency, Install
from atoll.model.packages import LOCATION, MOST_DEPENDENCIES, names_location
from atoll.model.resources import Resources, parse_cpu, parse_size
from atoll.model.session import Durability, WorkspaceMode
from atoll.model.template import LONGEST_DOCKERFILE, MOST_PACKAGES, REQUIREMENTS, Build
from atoll.model.volume import VolumeMount
from atoll.service.sessions.lifecycle import Change
from atoll.service.sessions.provisioning import NOTHING, Extras
from atoll.service.sessions.secrets import MAX_SECRET, MAX_SECRETS
from atoll.service.sessions.service import AS_SET, Terms

ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,254}$"
EnvName = Annotated[str, StringConstraints(pattern=ENV_NAME)]
EnvValue = Annotated[str, StringConstraints(max_length=32_768, pattern=r"^[^\x00]*$")]
Env = Annotated[dict[EnvName, EnvValue], Field(max_length=256)]
NewEnv = Annotated[dict[EnvName, EnvValue | None], Field(max_length=256)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Id = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Argument = Annotated[str, StringConstraints(max_length=131_071, pattern=r"^[^\x00]*$")]
Path = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]


def _fits_a_variable(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    if "\0" in text:
        raise ValueError("a variable cannot have a NUL in it")
    if len(text.encode("utf-8", "surrogatepass")) > MAX_SECRET:
        raise ValueError(f"at most {MAX_SECRET} bytes")
    return value


SecretValue = Annotated[SecretStr, AfterValidator(_fits_a_variable)]
"""Not shown where the request is, in an error or a traceback."""
FUNCTION = r"^([A-Za-z_][A-Za-z0-9_.]*:)?[A-Za-z_][A-Za-z0-9_]*$"
_JSON = "application/json"
MAX_MS = 2**53
"""Beyond it JSON's numbers are not exact; what is allowed here is far less."""
MAX_ANSWER = 32 * 1024
"""Bytes of the answer to a question, as JSON; a question has an entry of the log with it."""
MAX_STDIN = 1024 * 1024
"""Bytes of stdin that an executor takes at once."""
MAX_MESSAGE = 64 * 1024
"""The same of a message."""


LONGEST_CREDENTIAL = 16 * 1024
"""Characters of a registry's password or token: it goes to the engine in a header."""
MAX_METADATA = 8 * 1024
"""Bytes of an invocation's metadata as JSON: they stay in its row."""


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ResourcesIn(Wire):
    """Limits. What is left out comes from the template."""

    cpu: str | None = Field(None, examples=["1", "0.5", "500m"])
    memory: str | None = Field(None, examples=["512Mi"])
    disk: str | None = Field(None, examples=["1Gi"])
    max_processes: int | None = Field(None, ge=4, le=32_768)

    def over(self, base: Resources) -> Resources:
        """These limits where given, `base` elsewhere."""
        return Resources(
            cpu=base.cpu if self.cpu is None else parse_cpu(self.cpu),
            memory=base.memory if self.memory is None else parse_size(self.memory, "memory"),
            disk=base.disk if self.disk is None else parse_size(self.disk, "disk"),
            max_processes=self.max_processes or base.max_processes,
        )


def _of_the_index(name: object) -> object:
    if isinstance(name, str) and names_location(name):
        raise ValueError(LOCATION)
    return name


class DependencyIn(Wire):
    """A package of the index that the server's settings name."""

    name: Annotated[
        str,
        StringConstraints(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,98}(\[[A-Za-z0-9._, -]{1,200}\])?$"
        ),
        BeforeValidator(_of_the_index),
    ] = Field(
        description="With extras in brackets, if any.", examples=["requests", "uvicorn[standard]"]
    )
    version: Annotated[str, StringConstraints(max_length=200)] | None = Field(
        None, description="PEP 440 specifiers; any version when left out.", examples=["==2.31.0"]
    )

    def dependency(self) -> Dependency:
        return Dependency(self.name, "".join((self.version or "").split()))


class AddDependencies(Wire):
    dependencies: Annotated[
        list[DependencyIn], Field(min_length=1, max_length=MOST_DEPENDENCIES)
    ] = Field(description="Added to what the session has; of a package that it has, this version.")
    install_timeout: int = Field(300, ge=30, le=1800, description="Seconds.")
    allow_version_conflicts: bool = Field(
        False, description="Whether they may take the place of the template's versions."
    )


class VolumeMountIn(Wire):
    volume_id: Name
    path: Annotated[
        str,
        StringConstraints(pattern=r"^/(mnt|data|volumes)(/[A-Za-z0-9][A-Za-z0-9._-]{0,62}){1,4}$"),
    ] = Field(description="Where it is inside: beneath /mnt, /data or /volumes.")
    read_only: bool = True


class CreateVolume(Wire):
    id: Name
    size: str | None = Field(
        None, description="Of a local one; the default of workspaces.", examples=["1Gi"]
    )
    kind: Literal["local", "s3"] | None = Field(
        None,
        description="`local`: on the disk of this node. `s3`: in the bucket of the blob store, for "
        "all nodes; the default where that can be mounted.",
    )


class CreateWebhook(Wire):
    url: str = Field(examples=["https://example.com/atoll"])
    types: list[str] = Field(
        [],
        description="Of the events that it is told of; all when there are none.",
        examples=[["session.*", "execution.failed"]],
    )
    secret: str | None = Field(
        None,
        description="`whsec_` and 24 to 64 bytes as base64; made, and shown, if none is given.",
        repr=False,
    )
    enabled: bool = True


class ChangeWebhook(Wire):
    """What is left out stays as it is."""

    url: str | None = None
    types: list[str] | None = None
    secret: str | None = Field(None, repr=False)
    enabled: bool | None = None


EXTRAS = frozenset(
    {"secrets", "volumes", "workspace_mode", "durability", "started_from", "dependencies"}
)
"""Fields of which most sessions have none."""
TERMS = frozenset(
    {"labels", "node_labels", "auto_start", "idle_timeout", "archive_after", "delete_after"}
)


LONGEST = 10 * 365 * 86_400
Keeping = Annotated[int, Field(ge=0, le=LONGEST)]
"""Seconds; 0 is never."""
Label = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?$")
]
LabelValue = Annotated[str, StringConstraints(max_length=255)]
Labels = Annotated[dict[Label, LabelValue], Field(max_length=64)]
NewLabels = Annotated[dict[Label, LabelValue | None], Field(max_length=64)]


class CreateSession(ResourcesIn):
    template_id: Name | None = None
    capacity: int = Field(1, ge=1, description="Executions at the same time.")
    timeout: int | None = Field(None, ge=1, description="Seconds of life.")
    env_vars: Env = {}
    resources: ResourcesIn | None = Field(None, description="The four limits, as one object.")
    secrets: Annotated[dict[EnvName, SecretValue], Field(max_length=MAX_SECRETS)] = Field(
        {},
        description="Environment variables that no answer shows and that are stored encrypted.",
        json_schema_extra={"writeOnly": True},
    )
    volumes: Annotated[list[VolumeMountIn], Field(max_length=16)] = []
    workspace_mode: WorkspaceMode = Field(
        WorkspaceMode.SYNC,
        description="`sync`: on the node's disk, copied to the blob store. `mount`: in the blob "
        "store itself, mounted by the node.",
    )
    durability: Durability = Field(
        Durability.BACKGROUND,
        description="When what an execution changed is in the blob store: soon after its result, "
        "or before it is final.",
    )
    started_from: Id | None = Field(
        None, description="A session, ended or not, with whose last checkpoint this one begins."
    )
    dependencies: Annotated[list[DependencyIn], Field(max_length=MOST_DEPENDENCIES)] = Field(
        [], description="Python packages of its own."
    )
    install_timeout: int = Field(300, ge=30, le=1800, description="Seconds.")
    fail_on_dependency_error: bool = Field(
        True, description="Whether the session fails when they cannot be installed."
    )
    allow_version_conflicts: bool = Field(
        False, description="Whether they may take the place of the template's versions."
    )
    labels: Labels = {}
    node_labels: Labels = Field({}, description="Labels that its node must have.")
    auto_start: bool = Field(
        True, description="Whether a request that needs it starts it when it is paused or at rest."
    )
    idle_timeout: Keeping | None = Field(
        None, description="Seconds without requests after which it is stopped; 0 is never."
    )
    archive_after: Keeping | None = Field(
        None, description="Seconds at rest after which it is archived; 0 is never."
    )
    delete_after: Keeping | None = Field(
        None, description="Seconds at rest after which it ends; 0 is never."
    )

    @model_validator(mode="after")
    def _limits_once(self) -> CreateSession:
        flat = {"cpu", "memory", "disk", "max_processes"} & self.model_fields_set
        if self.resources is not None and flat:
            raise ValueError(f"resources: give {', '.join(sorted(flat))} or resources, not both")
        return self

    @model_validator(mode="after")
    def _variables_once(self) -> CreateSession:
        if both := sorted(self.env_vars.keys() & self.secrets.keys()):
            raise ValueError(f"secrets: env_vars has {', '.join(both)} as well; give one of them")
        return self

    def limits(self, base: Resources) -> Resources:
        return (self.resources or self).over(base)

    def terms(self) -> Terms:
        if not TERMS & self.model_fields_set:
            return AS_SET
        return Terms(
            labels=self.labels,
            node_labels=self.node_labels,
            auto_start=self.auto_start,
            idle_timeout=self.idle_timeout,
            archive_after=self.archive_after,
            delete_after=self.delete_after,
        )

    def extras(self) -> Extras:
        if not EXTRAS & self.model_fields_set:
            return NOTHING
        return Extras(
            secrets={name: value.get_secret_value() for name, value in self.secrets.items()},
            volumes=tuple(
                VolumeMount(mount.volume_id, mount.path, mount.read_only) for mount in self.volumes
            ),
            workspace_mode=self.workspace_mode,
            durability=self.durability,
            started_from=self.started_from,
            install=self._install(),
        )

    def _install(self) -> Install | None:
        if not self.dependencies:
            return None
        return Install(
            dependencies=tuple(item.dependency() for item in self.dependencies),
            timeout=self.install_timeout,
            fail_on_error=self.fail_on_dependency_error,
            allow_conflicts=self.allow_version_conflicts,
        )


class UpdateSession(ResourcesIn):
    """What is given is changed; the rest stays."""

    resources: ResourcesIn | None = Field(None, description="The four limits, as one object.")
    timeout: int | None = Field(None, ge=1, description="Seconds of life, from now on.")
    env_vars: NewEnv = Field({}, description="Added to what it has; null removes one.")
    labels: NewLabels = Field({}, description="Added to what it has; null removes one.")
    auto_start: bool | None = None
    idle_timeout: Keeping | None = Field(None, description="0 is never.")
    archive_after: Keeping | None = Field(None, description="0 is never.")
    delete_after: Keeping | None = Field(None, description="0 is never.")

    def change(self) -> Change:
        fields: dict[str, Any] = {}
        if self.auto_start is not None:
            fields["auto_start"] = self.auto_start
        for name in ("idle_timeout", "archive_after", "delete_after"):
            value = getattr(self, name)
            if value is not None:
                fields[name] = value or None
        return Change(
            limits=(self.resources or self).over,
            timeout=self.timeout,
            env_vars=self.env_vars,
            labels=self.labels,
            fields=fields,
        )


class SecretIn(Wire):
    value: SecretValue = Field(json_schema_extra={"writeOnly": True})


class Work(Wire):
    """What is to be run: `code` (in `language`) or `command`."""

    code: Annotated[str, StringConstraints(max_length=4 * 1024 * 1024)] | None = None
    language: Language = Language.PYTHON
    command: Annotated[list[Argument], Field(min_length=1, max_length=1024)] | None = None
    stdin: Annotated[str, StringConstraints(max_length=4 * 1024 * 1024)] | None = None
    stdin_open: bool = Field(
        False, description="Keep stdin open after `stdin`, for what is injected later."
    )
    env: Env = {}
    args: Annotated[list[Argument], Field(max_length=1024)] = []
    cwd: Path | None = Field(
        None,
        description="Relative to /workspace, which is the default; or any directory of the "
        "sandbox, by its absolute path.",
    )
    execution_id: Id | None = Field(
        None, description="An id of your own: sent again, nothing runs a second time."
    )
    context_id: Id | None = Field(None, description="The stateful context to run the code in.")

    @field_validator("command")
    @classmethod
    def _names_a_program(cls, command: list[str] | None) -> list[str] | None:
        if command is not None and not command[0]:
            raise ValueError("the first word names the program")
        return command

    @model_validator(mode="after")
    def _context_runs_code(self) -> Self:
        if self.context_id is not None and self.code is None:
            raise ValueError("context_id: a context runs code, not a command")
        return self


class Execute(Work):
    """`code` (in `language`) or `command`, one of the two."""

    timeout: float | None = Field(None, gt=0, description="Seconds.")
    event: Any = Field(default_factory=dict, description="Given to `handler`.")
    wait: float | None = Field(
        None,
        ge=0,
        description="Seconds to wait: the answer is the result itself if it comes in time.",
    )

    @field_validator("event")
    @classmethod
    def _is_json(cls, event: Any) -> Any:
        return _as_json(event)

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.code is None) == (self.command is None):
            raise ValueError("code: give code or command, one of the two")
        return self

    def request(self, timeout: float) -> Request:
        """What runs; `timeout` is for one that names none, in seconds."""
        return Request(
            code=self.code,
            language=self.language if self.command is None else None,
            command=None if self.command is None else tuple(self.command),
            event=self.event,
            stdin=self.stdin,
            stdin_open=self.stdin_open,
            args=tuple(self.args),
            env=self.env,
            cwd=self.cwd,
            timeout=self.timeout or timeout,
            context_id=self.context_id,
            mode=Mode.SYNC if self.wait else Mode.ASYNC,
        )


class CreateContext(Wire):
    language: Annotated[str, StringConstraints(max_length=64)] = Field(
        "python", description="python is the only one that has contexts."
    )
    cwd: Path | None = Field(
        None,
        description="Where it begins: relative to /workspace, which is the default; or any "
        "directory of the sandbox, by its absolute path.",
    )


class Terminal(Wire):
    rows: int = Field(24, ge=1, le=65_535)
    cols: int = Field(80, ge=1, le=65_535)


class Invoke(Work):
    """
    A function in `code` or, as `module:name`, in the workspace; or `code` or a `command` as they
    are.
    """

    session_id: Id
    function_name: Annotated[str, StringConstraints(pattern=FUNCTION, max_length=255)] | None = (
        Field(None, description="A name in `code`; without code, `module:name`.")
    )
    mode: Mode = Mode.SYNC
    invocation_id: Id | None = Field(
        None, description="An id of your own: sent again, it is the same invocation."
    )
    timeout_ms: int | None = Field(None, ge=1, le=MAX_MS, description="Milliseconds.")
    input: Any = Field(
        None,
        description="JSON for the function; without function_name on stdin, and for `handler`.",
    )
    input_base64: Annotated[str, StringConstraints(max_length=6 * 1024 * 1024)] | None = Field(
        None, description="Bytes instead of JSON, to the same place."
    )
    content_type: Annotated[str, StringConstraints(max_length=255, pattern=r"^[!-~ ]+$")] | None = (
        None
    )
    metadata: Annotated[
        dict[
            Annotated[str, StringConstraints(min_length=1, max_length=128)],
            Annotated[str, StringConstraints(max_length=4096)],
        ],
        Field(max_length=64, description=f"At most {MAX_METADATA} bytes of JSON in all."),
    ] = {}
    wait_ms: int | None = Field(
        None,
        ge=0,
        le=MAX_MS,
        description="Milliseconds that mode sync waits, at most `execution.max_wait`.",
    )
    terminal: Terminal | None = Field(
        None,
        description="The terminal to run on; in mode console one of 24 rows and 80 columns, unless "
        "`stdin_open` asks for pipes.",
    )

    @field_validator("input")
    @classmethod
    def _is_json(cls, value: Any) -> Any:
        return _as_json(value)

    @field_validator("metadata")
    @classmethod
    def _is_short(cls, metadata: dict[str, str]) -> dict[str, str]:
        if metadata and len(json.dumps(metadata)) > MAX_METADATA:
            raise ValueError(f"at most {MAX_METADATA} bytes of JSON in all")
        return metadata

    @field_validator("input_base64")
    @classmethod
    def _is_base64(cls, text: str | None) -> str | None:
        if text is not None:
            try:
                base64.b64decode(text, validate=True)
            except ValueError:
                raise ValueError("this is not base64") from None
        return text

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.code is not None and self.command is not None:
            raise ValueError("command: give code or command, not both")
        if self.command is not None and self.function_name is not None:
            raise ValueError("function_name: a command has no functions")
        if self.code is None and self.command is None:
            if self.function_name is None:
                raise ValueError("code: give function_name, code or command")
            if ":" not in self.function_name:
                raise ValueError("function_name: without code it is module:name")
        elif self.function_name is not None and ":" in self.function_name:
            raise ValueError("function_name: module:name goes without code")
        if self.function_name is not None and self.language is not Language.PYTHON:
            raise ValueError("function_name: only Python has functions here")
        if self._has_json and self.input_base64 is not None:
            raise ValueError("input_base64: give input or input_base64, not both")
        if self.content_type is not None and not self._has_input:
            raise ValueError("content_type: there is no input that it is the type of")
        if self.function_name is None and self.stdin is not None and self._has_input:
            raise ValueError("stdin: without function_name the input is stdin; give one of the two")
        if self._on_terminal:
            for name in ("stdin", "context_id"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}: not on a terminal")
            if self._has_input and self.function_name is None:
                raise ValueError("input: nothing goes to stdin on a terminal but what is typed")
        return self

    @property
    def _has_json(self) -> bool:
        """Whether there is JSON for it; null too, where it was given."""
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

    def request(self, timeout: float) -> Request:
        """What runs; `timeout` is for one that names none, in seconds."""
        stdin, body = self.stdin, self.input_base64
        if self._has_input and self.function_name is None:
            raw = base64.b64decode(body) if body is not None else json.dumps(self.input).encode()
            stdin = raw.decode("utf-8", "surrogateescape")
            if not self._runs_python:
                body = None
        terminal = (self.terminal or Terminal()) if self._on_terminal else None
        content_type = self.content_type
        if content_type is None and self._has_input:
            content_type = _JSON if self.input_base64 is None else "application/octet-stream"
        return Request(
            code=self.code,
            language=None if self.command is not None else self.language,
            command=None if self.command is None else tuple(self.command),
            event=self.input if self._has_json else {},
            stdin=stdin,
            stdin_open=self.stdin_open,
            args=tuple(self.args),
            env=self.env,
            cwd=self.cwd,
            timeout=timeout if self.timeout_ms is None else self.timeout_ms / 1000,
            function_name=self.function_name,
            body=body,
            content_type=content_type,
            context_id=self.context_id,
            terminal=None if terminal is None else (terminal.rows, terminal.cols),
            mode=self.mode,
            metadata=self.metadata,
        )


class Cancel(Wire):
    reason: Annotated[str, StringConstraints(max_length=1000)] | None = None


class Inject(Wire):
    """A `message` that the code reads with `messages()`, or more for its stdin."""

    message: Annotated[str, StringConstraints(max_length=MAX_MESSAGE)] | None = None
    stdin: Annotated[str, StringConstraints(max_length=MAX_STDIN)] | None = None
    stdin_base64: Annotated[str, StringConstraints(max_length=-(-MAX_STDIN // 3) * 4)] | None = None
    eof: bool = Field(False, description="Close stdin after it.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [self.message, self.stdin, self.stdin_base64]
        count = sum(value is not None for value in given)
        if count > 1 or (count == 0 and not self.eof):
            raise ValueError("message: give message, stdin or stdin_base64, one of them")
        if self.message is not None and self.eof:
            raise ValueError("eof: a message does not end stdin")
        if self.stdin_base64 is not None:
            try:
                base64.b64decode(self.stdin_base64, validate=True)
            except ValueError:
                raise ValueError("stdin_base64: this is not base64") from None
        if self._size(self.message) > MAX_MESSAGE:
            raise ValueError(f"message: at most {MAX_MESSAGE} bytes")
        if self._size(self.stdin) > MAX_STDIN:
            raise ValueError(f"stdin: at most {MAX_STDIN} bytes at once")
        return self

    @staticmethod
    def _size(text: str | None) -> int:
        return 0 if text is None else len(text.encode("utf-8", "surrogatepass"))

    @property
    def data(self) -> str:
        """What goes to stdin, as base64."""
        if self.stdin_base64 is not None:
            return self.stdin_base64
        return base64.b64encode((self.stdin or "").encode("utf-8", "surrogatepass")).decode()


class Resume(Wire):
    """A person's answer to what the execution asks."""

    approved: bool
    answer: Any = None
    reason: Annotated[str, StringConstraints(max_length=1000)] | None = None
    approval_id: Id | None = Field(None, description="The question, when several may be asked.")

    @field_validator("answer")
    @classmethod
    def _is_short_json(cls, answer: Any) -> Any:
        if len(json.dumps(answer, allow_nan=False)) > MAX_ANSWER:
            raise ValueError(f"at most {MAX_ANSWER} bytes of JSON")
        return answer


def _as_json(value: Any) -> Any:
    if value:
        # The parser takes NaN and Infinity, which JSON does not have.
        try:
            json.dumps(value, allow_nan=False)
        except RecursionError:
            raise ValueError("this is nested too deeply") from None
    return value


class EncodedPath(Wire):
    """A path whose bytes are not all UTF-8."""

    encoded: Annotated[str, StringConstraints(min_length=1, max_length=12_288)] = Field(
        description="Percent-encoded, as `encoded_path` in answers.", examples=["a%FF"]
    )


PathIn = Path | EncodedPath


def path_of(given: str | EncodedPath) -> str:
    return given if isinstance(given, str) else decoded(given.encoded)


class Mkdir(Wire):
    path: PathIn
    parents: bool = True


class Move(Wire):
    source: PathIn
    target: PathIn
    overwrite: bool = False


class Copy(Wire):
    source: PathIn
    target: PathIn
    overwrite: bool = False


class Chmod(Wire):
    path: PathIn
    mode: Annotated[str, StringConstraints(pattern=r"^0?[0-7]{3}$")] = Field(
        description="Octal.", examples=["0755"]
    )


class Presign(Wire):
    path: PathIn
    method: Literal["GET", "PUT"] = "GET"
    expires_in: int = Field(3600, ge=1, le=7 * 24 * 3600, description="Seconds.")
    filename: Annotated[str, StringConstraints(min_length=1, max_length=255)] | None = Field(
        None, description="What a download is called; the file's own name when not set."
    )
    direct: bool = Field(
        False, description="PUT straight to the blob store, if it can; then POST `complete_url`."
    )


class SecurityContext(Wire):
    require: list[Literal[tuple(REQUIREMENTS)]] = []  # type: ignore[valid-type]


def _is_no_order(package: str) -> str:
    name, _, version = package.partition("=")
    if name.endswith("-") or version.endswith(("-", "+")):
        raise ValueError("a sign at its end is an order of apt")
    return package


DebianPackage = Annotated[
    str,
    StringConstraints(
        max_length=200, pattern=r"^[a-z0-9][a-z0-9+.-]+(=[A-Za-z0-9][A-Za-z0-9.+:~-]*)?$"
    ),
    AfterValidator(_is_no_order),
]
"""
A name of Debian's policy, with a version if need be; never an option, a path or a URL, and nothing
that apt would take for an order to remove it. A name may end with `+`, as g++ does.
"""
PythonPackage = Annotated[str, StringConstraints(min_length=1, max_length=200)]
"""A requirement of PEP 508 without URL and marker; the service reads it."""


def _fits_a_header(value: SecretStr) -> SecretStr:
    if not 1 <= len(value.get_secret_value()) <= LONGEST_CREDENTIAL:
        raise ValueError(f"1 to {LONGEST_CREDENTIAL} characters")
    return value


Credential = Annotated[SecretStr, AfterValidator(_fits_a_header)]


class RegistryIn(Wire):
    """
    Credentials of a registry: `username` and `password`, or `identity_token`. With `server` alone,
    those that the template has for it already.
    """

    server: Annotated[str, StringConstraints(max_length=255, pattern=SERVER)] | None = Field(
        None,
        description="Host, with port if need be; that of `image` when left out.",
        examples=["registry.example.com:5000"],
    )
    username: Annotated[str, StringConstraints(min_length=1, max_length=255)] | None = None
    password: Credential | None = Field(None, json_schema_extra={"writeOnly": True})
    identity_token: Credential | None = Field(None, json_schema_extra={"writeOnly": True})

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.username is None) != (self.password is None):
            raise ValueError("registry: username and password go together")
        if self.username is not None and self.identity_token is not None:
            raise ValueError("registry: give username and password, or identity_token")
        return self

    def credentials(self) -> RegistryAuth:
        return RegistryAuth(
            self.server or "",
            self.username or "",
            "" if self.password is None else self.password.get_secret_value(),
            "" if self.identity_token is None else self.identity_token.get_secret_value(),
        )


class TemplateIn(Wire):
    name: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    image: str = Field(
        "",
        max_length=4096,
        description="Root file system directory on the node; on nodes with Docker, the name of an "
        "image, which is pulled if it is not there.",
    )
    base_image: str = Field(
        "",
        max_length=4096,
        description="What packages are put on: a root file system directory on the node, "
        "`template:` and the id of another template, or nothing for the node's own /usr. Without "
        "packages, a note of what the image was made from.",
    )
    debian_packages: Annotated[list[DebianPackage], Field(max_length=MOST_PACKAGES)] = Field(
        [], description="To be installed on the base, as `name` or `name=version`."
    )
    python_packages: Annotated[list[PythonPackage], Field(max_length=MOST_DEPENDENCIES)] = Field(
        [], description="To be installed, as requirements (PEP 508)."
    )
    dockerfile: Annotated[str, StringConstraints(max_length=LONGEST_DOCKERFILE)] | None = Field(
        None,
        description="What the image is built from, in place of `image`. On nodes with Docker.",
        examples=["FROM python:3.12-slim\nRUN pip install polars\n"],
    )
    build_context: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] | None = Field(
        None,
        description="Files for the Dockerfile: the SHA-256 of a tar that was put to "
        "`/build-contexts/{digest}`.",
    )
    registry: RegistryIn | None = Field(
        None,
        description="Credentials by which the image, or the Dockerfile's base, is pulled. Stored "
        "encrypted; answers tell the server alone.",
    )
    runtime: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{0,64}$")] = Field(
        "",
        description="OCI runtime of its instances by the engine's name for it; the node's choice "
        "when empty. On nodes with Docker.",
        examples=["runc", "runsc"],
    )
    pre_installed_packages: Annotated[list[PythonPackage], Field(max_length=MOST_DEPENDENCIES)] = (
        Field([], description="Another name of `python_packages`, which wins if both are given.")
    )
    default_resources: ResourcesIn = ResourcesIn()
    security_context: SecurityContext = SecurityContext()
    python: str = Field(
        "", max_length=4096, description="Interpreter; a virtual environment's works."
    )
    preload: Annotated[
        list[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.]{0,254}$")]],
        Field(max_length=100),
    ] = []
    env: Env = {}
    pool_size: int = Field(0, ge=0, description="Ready instances to keep at least.")
    pool_max: int | None = Field(
        None,
        ge=0,
        description="Ready instances to keep at most, when many sessions are created. Without, as "
        "many as the server allows, and none at all if `pool_size` is 0.",
    )

    def build(self) -> Build | None:
        python_packages = self.python_packages or self.pre_installed_packages
        if not self.debian_packages and not python_packages:
            return None
        return Build(
            debian_packages=tuple(self.debian_packages), python_packages=tuple(python_packages)
        )


class CreateTemplate(TemplateIn):
    id: Name | None = None
