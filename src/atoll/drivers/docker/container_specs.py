"""Describes the container and the executor of an instance, from its template and its files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.drivers.docker import container_config, exec_link, socket_link
from atoll.drivers.docker.container_config import BaseImage, ContainerSpec
from atoll.drivers.docker.labels import DiskLimit, Label, LinkKind
from atoll.drivers.shared import portable_interpreter
from atoll.drivers.shared.executor_config import ExecutorConfig
from atoll.drivers.shared.portable_interpreter import InterpreterMissing

if TYPE_CHECKING:
    from datetime import timedelta

    from atoll.drivers.docker.engine import Engine
    from atoll.drivers.docker.images import DockerImages
    from atoll.drivers.docker.node_identity import NodeIdentity
    from atoll.drivers.docker.storage import InstanceFiles, Storage
    from atoll.model.instance import InstanceSpec
    from atoll.model.template import Template
    from atoll.settings import DockerSettings


@dataclass(frozen=True)
class ContainerSpecs:
    engine: Engine
    identity: NodeIdentity
    settings: DockerSettings
    storage: Storage
    images: DockerImages
    unattended_grace: timedelta
    """How long the executor of an instance that is not ephemeral runs without a link."""
    seccomp: dict[str, str]
    """Filter programs that executors install, in addition to the engine's, by machine."""

    async def base(self, template: Template) -> BaseImage:
        image = await self.images.find(template)
        path = image.env.get("PATH", container_config.PATH)
        runtime = template.runtime or self.settings.runtime
        own_kernel = self.engine.is_gvisor(runtime)
        python = await self.images.python(template)
        if python is not None:
            return BaseImage(
                image.id, (python,), python, path, runtime, own_kernel, volumes=image.volumes
            )
        if template.python:
            raise InterpreterMissing(
                f"The image of template {template.id} has no {template.python}, which the template "
                "names as its interpreter."
            )
        return BaseImage(
            image.id,
            portable_interpreter.command(),
            f"{portable_interpreter.TARGET}/bin/python3",
            f"{path}:{portable_interpreter.TARGET}/bin",
            runtime,
            own_kernel,
            (await self.storage.interpreter(),),
            image.volumes,
        )

    def container(
        self, spec: InstanceSpec, base: BaseImage, files: InstanceFiles, environment: str | None
    ) -> ContainerSpec:
        """`environment` is the path of the template's package environment."""
        # gVisor does not let this machine connect to sockets of its containers.
        relayed = base.own_kernel or self.storage.socket(spec.instance_id) is None
        labels: dict[str, str] = {
            Label.NODE: self.identity.name,
            Label.INSTANCE: spec.instance_id,
            Label.WORKSPACE: spec.workspace or spec.instance_id,
            Label.LINK: LinkKind.RELAY if relayed else LinkKind.SOCKET,
            Label.UID: str(files.uid),
            Label.DISK: DiskLimit.FILE_SYSTEM if files.size_is_limited else DiskLimit.EXECUTOR,
        }
        return ContainerSpec(
            base=base,
            labels=labels,
            mounts=tuple(files.mounts),
            resources=spec.resources,
            uid=files.uid,
            relays=exec_link.MAX_RELAYS if relayed else 0,
            environment=environment,
            tmp_size=self.settings.tmp_size,
            open_files=self.settings.open_files,
        )

    def executor(self, spec: InstanceSpec, container: ContainerSpec) -> ExecutorConfig:
        listen, peer = f"{container_config.LINK}/{socket_link.SOCKET_FILE}", None
        if container.relays:
            listen, peer = f"\0{exec_link.SOCKET_NAME}", exec_link.RELAY_UID
        journal = [f"{container_config.JOURNAL}/{number}" for number in (0, 1)]
        return ExecutorConfig(
            token=self.identity.token(spec.instance_id),
            listen=listen,
            peer=peer,
            journal=tuple(journal if self.storage.journals else ()),
            preload=spec.template.preload,
            packages=container.environment or "",
            ephemeral=spec.ephemeral,
            unattended=None if spec.ephemeral else self.unattended_grace.total_seconds(),
            seccomp=self.seccomp,
        )
