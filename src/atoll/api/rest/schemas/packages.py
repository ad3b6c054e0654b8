"""Python packages of a session."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from atoll.api.rest.schemas.base import From, RequestBody, ResponseBody, encoder_of
from atoll.model.install import Dependency, Install
from atoll.model.packages import LOCATION, MAX_DEPENDENCIES, names_location


def _check_not_a_location(name: object) -> object:
    if isinstance(name, str) and names_location(name):
        raise ValueError(LOCATION)
    return name


class DependencyIn(RequestBody):
    """A package from the package index that the server is configured with."""

    name: Annotated[
        str,
        StringConstraints(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,98}(\[[A-Za-z0-9._, -]{1,200}\])?$"
        ),
        BeforeValidator(_check_not_a_location),
    ] = Field(description="Extras follow in brackets.", examples=["requests", "uvicorn[standard]"])
    version: Annotated[str, StringConstraints(max_length=200)] | None = Field(
        None, description="PEP 440 specifiers; any version if omitted.", examples=["==2.31.0"]
    )

    def dependency(self) -> Dependency:
        return Dependency(self.name, "".join((self.version or "").split()))


Dependencies = Annotated[list[DependencyIn], Field(max_length=MAX_DEPENDENCIES)]


class InstallOptions(RequestBody):
    install_timeout: int = Field(
        300, ge=30, le=1800, description="Seconds that the installation may take."
    )
    allow_version_conflicts: bool = Field(
        False,
        description="Allow the packages to replace other versions that the template has.",
    )


class AddDependencies(InstallOptions):
    dependencies: Annotated[Dependencies, Field(min_length=1)] = Field(
        description="Added to the packages that the session has. A package that it already has "
        "gets the version given here."
    )


class InstallOut(ResponseBody, of=Install):
    """The Python packages of a session and the state of their installation."""

    status: Literal["installing", "installed", "failed"]
    requested: Annotated[
        list[str], From(lambda install: [item.requirement for item in install.dependencies])
    ]
    installed: list[str] = Field(description="As `name==version`; empty until they are installed.")
    message: str | None


install_out = encoder_of(InstallOut)
