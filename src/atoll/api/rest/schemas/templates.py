"""Templates, which sessions are created from."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, SecretStr, StringConstraints, model_validator

from atoll.api.rest.schemas.base import From, Page, RequestBody, ResponseBody, encoder_of
from atoll.api.rest.schemas.resources import ResourcesIn, ResourcesOut
from atoll.api.rest.schemas.types import Env, Name
from atoll.drivers.base import RegistryAuth
from atoll.model.image import SERVER
from atoll.model.packages import MAX_DEPENDENCIES
from atoll.model.resources import Resources
from atoll.model.template import (
    MAX_DEBIAN_PACKAGES,
    MAX_DOCKERFILE,
    REQUIREMENTS,
    Build,
    Template,
    TemplateStatus,
)

MAX_CREDENTIAL = 16 * 1024
"""Characters of a registry's password or token: it is sent to the engine in a header."""
SHA256 = r"^[0-9a-f]{64}$"


def _check_no_suffix(package: str) -> str:
    name, _, version = package.partition("=")
    if name.endswith("-") or version.endswith(("-", "+")):
        raise ValueError("must not end with - or +, which apt interprets as operators")
    return package


DebianPackage = Annotated[
    str,
    StringConstraints(
        max_length=200, pattern=r"^[a-z0-9][a-z0-9+.-]+(=[A-Za-z0-9][A-Za-z0-9.+:~-]*)?$"
    ),
    AfterValidator(_check_no_suffix),
]
"""
A package name by Debian's policy, optionally with a version: never an option, a path, a URL, or a
name that apt would remove. A name may end with `+`, like g++.
"""
PythonPackage = Annotated[str, StringConstraints(min_length=1, max_length=200)]
"""A PEP 508 requirement without URL and marker; the service parses it."""
PythonPackages = Annotated[list[PythonPackage], Field(max_length=MAX_DEPENDENCIES)]


def _fits_a_header(value: SecretStr) -> SecretStr:
    if not 1 <= len(value.get_secret_value()) <= MAX_CREDENTIAL:
        raise ValueError(f"1 to {MAX_CREDENTIAL} characters")
    return value


Credential = Annotated[SecretStr, AfterValidator(_fits_a_header)]


class SecurityContext(RequestBody):
    require: list[Literal[tuple(REQUIREMENTS)]] = Field([])  # type: ignore[valid-type]


class RegistryIn(RequestBody):
    """
    Credentials for a registry: `username` and `password`, or `identity_token`. With `server` alone,
    the credentials that the template has for it are kept.
    """

    server: Annotated[str, StringConstraints(max_length=255, pattern=SERVER)] | None = Field(
        None,
        description="Host, optionally with a port; the registry of `image` if omitted.",
        examples=["registry.example.com:5000"],
    )
    username: Annotated[str, StringConstraints(min_length=1, max_length=255)] | None = None
    password: Credential | None = Field(None, json_schema_extra={"writeOnly": True})
    identity_token: Credential | None = Field(None, json_schema_extra={"writeOnly": True})

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.username is None) != (self.password is None):
            raise ValueError("registry: give username and password together")
        if self.username is not None and self.identity_token is not None:
            raise ValueError("registry: give either username and password, or identity_token")
        return self

    def credentials(self) -> RegistryAuth:
        return RegistryAuth(
            self.server or "",
            self.username or "",
            "" if self.password is None else self.password.get_secret_value(),
            "" if self.identity_token is None else self.identity_token.get_secret_value(),
        )


class TemplateIn(RequestBody, of=Template):
    name: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    image: str = Field(
        "",
        max_length=4096,
        description="A root file system directory on the node; on nodes with Docker, the name of "
        "an image, which is pulled if the node does not have it.",
    )
    base_image: str = Field(
        "",
        max_length=4096,
        description="What packages are installed on: a root file system directory on the node, "
        "`template:` followed by the id of another template, or empty for the node's own /usr. "
        "Without packages, a note about what the image was made from.",
    )
    debian_packages: Annotated[list[DebianPackage], Field(max_length=MAX_DEBIAN_PACKAGES)] = Field(
        [], description="Debian packages to install, as `name` or `name=version`."
    )
    python_packages: PythonPackages = Field(
        [], description="Python packages to install, as requirements (PEP 508)."
    )
    dockerfile: Annotated[str, StringConstraints(max_length=MAX_DOCKERFILE)] | None = Field(
        None,
        description="Dockerfile to build the image from, instead of `image`. On nodes with Docker.",
        examples=["FROM python:3.12-slim\nRUN pip install polars\n"],
    )
    build_context: Annotated[str, StringConstraints(pattern=SHA256)] | None = Field(
        None,
        description="Files for the Dockerfile: the SHA-256 of a tar that was uploaded to "
        "`/build-contexts/{digest}`.",
    )
    registry: RegistryIn | None = Field(
        None,
        description="Credentials to pull the image, or the base image of the Dockerfile. They are "
        "stored encrypted; responses contain only the server.",
    )
    runtime: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{0,64}$")] = Field(
        "",
        description="OCI runtime of its instances, by the engine's name for it; the node's default "
        "if empty. On nodes with Docker.",
        examples=["runc", "runsc"],
    )
    pre_installed_packages: PythonPackages = Field(
        [], description="Older name of `python_packages`, which wins if both are given."
    )
    default_resources: ResourcesIn = ResourcesIn()
    security_context: SecurityContext = SecurityContext()
    python: str = Field(
        "",
        max_length=4096,
        description="Path of the Python interpreter; that of a virtual environment works too.",
    )
    preload: Annotated[
        list[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.]{0,254}$")]],
        Field(max_length=100),
    ] = Field([])
    env: Env = Field({})
    pool_size: int = Field(0, ge=0, description="Minimum number of ready instances.")
    pool_max: int | None = Field(
        None,
        ge=0,
        description="Maximum number of ready instances, when many sessions are created. If "
        "omitted, the server's limit, or none at all if `pool_size` is 0.",
    )

    def template(self, template_id: str, base: Resources, now: datetime) -> Template:
        return Template(
            id=template_id,
            created_at=now,
            updated_at=now,
            default_resources=self.default_resources.over(base),
            require=tuple(self.security_context.require),
            preload=tuple(self.preload),
            dockerfile=self.dockerfile or "",
            build=self._build(),
            **{name: getattr(self, name) for name in _COPIED},
        )

    def _build(self) -> Build | None:
        python_packages = self.python_packages or self.pre_installed_packages
        if not self.debian_packages and not python_packages:
            return None
        return Build(
            debian_packages=tuple(self.debian_packages), python_packages=tuple(python_packages)
        )


_COPIED = (
    "name", "image", "base_image", "python", "env", "pool_size", "pool_max", "runtime",
    "build_context",
)  # fmt: skip
"""Fields that a template stores as they are given."""


class CreateTemplate(TemplateIn, of=Template):
    id: Name | None = None


class RegistryOut(ResponseBody):
    """The registry that the template has credentials for."""

    server: str


def _build_of(name: str) -> From:
    return From(lambda template: getattr(template.build or Build(), name))


def _image_of(name: str) -> From:
    return From(
        lambda template: (
            template.build and template.build.image and getattr(template.build.image, name)
        )
    )


class TemplateOut(ResponseBody, of=Template):
    id: str
    name: str
    image: str
    base_image: str
    pre_installed_packages: Annotated[list[str], _build_of("python_packages")]
    default_resources: ResourcesOut
    security_context: Annotated[
        dict[str, Any], From(lambda template: {"require": list(template.require)})
    ]
    python: str
    preload: list[str]
    env: dict[str, str]
    pool_size: int
    pool_max: int | None
    debian_packages: Annotated[list[str], _build_of("debian_packages")]
    python_packages: Annotated[list[str], _build_of("python_packages")]
    installed_packages: Annotated[list[str], _build_of("installed")]
    runtime: str
    dockerfile: Annotated[str | None, From(lambda template: template.dockerfile or None)]
    build_context: str | None
    registry: RegistryOut | None
    image_digest: Annotated[str | None, _image_of("digest")] = Field(
        description="Digest of the image in its registry, once it was pulled."
    )
    entrypoint: Annotated[list[str] | None, _image_of("entrypoint")] = Field(
        description="Entrypoint of the image, once it is known. Instances run Atoll's executor."
    )
    command: Annotated[list[str] | None, _image_of("command")] = Field(
        description="CMD of the image, once it is known."
    )
    version: Annotated[int, From("number")]
    status: TemplateStatus
    message: Annotated[str | None, _build_of("message")]
    attempts: Annotated[int, _build_of("attempts")]
    created_at: datetime
    updated_at: datetime


class TemplatePage(Page[TemplateOut]):
    pass


template_out = encoder_of(TemplateOut)


class BuildContextOut(ResponseBody):
    digest: str = Field(description="SHA-256, by which a template refers to it.")
    size: int = Field(description="Bytes.")
