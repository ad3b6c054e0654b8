"""Describes to the spawner how an instance is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.drivers.local import sandbox
from atoll.drivers.local.spawner_client import ForkServer, SpawnRequest
from atoll.drivers.shared.executor_config import RLIMITS
from atoll.drivers.shared.workspace_files import IMAGE
from atoll.protocol.limits import JOURNAL_FILE_SIZE

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.drivers.local.sandbox_host import SandboxHost
    from atoll.drivers.shared.packages.environments import NodeEnvironments
    from atoll.drivers.shared.volumes.node_volumes import NodeVolumes
    from atoll.drivers.shared.workspace_files import Workspace, WorkspaceFiles
    from atoll.model.instance import InstanceSpec
    from atoll.settings import LinkSettings, LocalSettings

CALLBACK_FILE = "callback.json"
"""In an instance's directory: where its executor reports, and its token."""


@dataclass(frozen=True)
class InstanceRequests:
    host: SandboxHost
    executor: Path
    """The executor's bundle."""
    inside: Path
    """The directory of what user code may import and call."""
    files: WorkspaceFiles
    volumes: NodeVolumes
    packages: NodeEnvironments[sandbox.RootFileSystem]
    settings: LocalSettings
    fork_server: ForkServer | None
    """The warm interpreter for templates without one of their own."""
    link: LinkSettings

    def make(
        self,
        spec: InstanceSpec,
        tree: sandbox.RootFileSystem,
        workspace: Workspace,
        directory: Path,
    ) -> SpawnRequest:
        host, template = self.host, spec.template
        path = str(self.volumes.files(workspace) or self.files.path(workspace))
        image = path if workspace.kind == IMAGE else None
        sources = host.sources(tree, path, image)
        environment = template.build.environment if template.build is not None else None
        unattended = self.link.unattended_grace
        box = sandbox.Sandbox(
            tree=tree,
            executor=str(self.executor),
            inside=str(self.inside),
            workspace=path,
            packages=str(self.packages.directory),
            environment=None if environment is None else self.packages.inside(environment),
            hidden=host.hidden,
            tmp_size=self.settings.tmp_size,
            preload=template.preload,
            # The default template is this machine's interpreter, without this machine's .pth files.
            hooks=bool(template.root or template.python),
            seccomp=host.seccomp is not None,
            ephemeral=spec.ephemeral,
            unattended=None if spec.ephemeral else unattended.total_seconds(),
            reports_as=spec.instance_id if spec.callback is not None else None,
            volumes=tuple(
                (str(self.volumes.source(volume)), mount.path, mount.read_only)
                for volume, mount in spec.volumes
            ),
        )
        argv = sandbox.arguments(host.bubblewrap, box, sources)
        return SpawnRequest(
            instance=spec.instance_id,
            argv=argv,
            fork_server=None if template.root or template.python else self.fork_server,
            directory=str(directory),
            seccomp=None if host.seccomp is None else str(host.seccomp),
            groups=host.groups.join_files(spec.instance_id),
            uid=workspace.uid,
            rlimits={
                **RLIMITS,
                # The executor writes files of the workspace, and its journal.
                "FSIZE": max(spec.resources.disk, JOURNAL_FILE_SIZE),
                "NOFILE": self.settings.open_files,
            },
            stage=sources.stage,
            binds=list(sources.binds.items()),
            layers=list(tree.layers),
            mounts=host.mounts,
            image=image,
            owner=workspace.owner,
            callback=str(directory / CALLBACK_FILE) if spec.callback is not None else None,
            journal=[str(file) for file in self.files.journal(workspace)],
            ephemeral=spec.ephemeral,
        )
