"""
The node plugin of the CSI driver `NAME`: mounts a bucket for pods, with s3fs.

A stand-in for a product, started on each node by `tests.servers.kubernetes.bucket_driver`. It
mounts and unmounts volumes, and implements nothing else of CSI. Every uid can read and write all
files.

Each volume of a pod has an s3fs of its own, which outlives the plugin: mounts of running pods
survive its end. The plugin has no state, so one that is started again can unmount them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from time import monotonic, sleep

import grpc

from tests.servers.kubernetes import protobuf

NAME = "s3.csi.test"
MOUNT_TIMEOUT = 30
"""Seconds."""
S3FS_OPTIONS = (
    "allow_other,nosuid,nodev,umask=0000,use_path_request_style,"
    # With the defaults, a pod sees changes of other pods, and failures of S3, after minutes.
    "stat_cache_expire=1,connect_timeout=5,readwrite_timeout=10,retries=2,dbglevel=crit"
)

Method = Callable[[protobuf.Message], Mapping[int, str]]


@dataclass(frozen=True)
class Places:
    """Files of the driver in the root directory of a kubelet."""

    kubelet: Path

    @property
    def directory(self) -> Path:
        return self.kubelet / "plugins" / NAME

    @property
    def socket(self) -> Path:
        return self.directory / "csi.sock"

    @property
    def registration_socket(self) -> Path:
        """The kubelet registers every plugin that has a socket in this directory."""
        return self.kubelet / "plugins_registry" / f"{NAME}-reg.sock"

    @property
    def passwords(self) -> Path:
        """The credentials, for s3fs."""
        return self.directory / "s3fs.passwd"

    @property
    def registered(self) -> Path:
        """Exists as soon as the kubelet has registered this run of the plugin."""
        return self.directory / "registered"


@dataclass(frozen=True)
class Bucket:
    endpoint: str
    name: str
    passwords: Path

    def mount(self, target: Path) -> None:
        """Mount it, and wait until it can be used."""
        options = f"{S3FS_OPTIONS},url={self.endpoint},passwd_file={self.passwords}"
        s3fs = subprocess.Popen(
            ["s3fs", self.name, str(target), "-f", "-o", options],
            stdin=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": "/usr/bin:/bin"},
        )
        try:
            _wait_for_mount(target, s3fs)
        except BaseException:
            s3fs.kill()
            s3fs.wait()
            unmount(target)
            raise
        # It ends when it is unmounted.
        Thread(target=s3fs.wait, daemon=True).start()


@dataclass(frozen=True)
class NodePlugin:
    """The methods of the gRPC services. Numbers are those of fields in csi.proto."""

    node: str
    bucket: Bucket
    places: Places

    def services(self) -> dict[str, dict[str, Method]]:
        return {
            "csi.v1.Identity": {
                "GetPluginInfo": lambda _: {1: NAME, 2: "1"},
                "GetPluginCapabilities": lambda _: {},
                "Probe": lambda _: {},
            },
            "csi.v1.Node": {
                "NodeGetInfo": lambda _: {1: self.node},
                "NodeGetCapabilities": lambda _: {},
                "NodePublishVolume": self.publish,
                "NodeUnpublishVolume": self.unpublish,
            },
            "pluginregistration.Registration": {
                "GetInfo": lambda _: {
                    1: "CSIPlugin",
                    2: NAME,
                    3: str(self.places.socket),
                    4: "1.0.0",
                },
                "NotifyRegistrationStatus": self.note_registration,
            },
        }

    def publish(self, request: protobuf.Message) -> Mapping[int, str]:
        target = Path(request.text(4))
        if is_usable(target):
            return {}
        unmount(target)
        target.mkdir(exist_ok=True)
        self.bucket.mount(target)
        return {}

    def unpublish(self, request: protobuf.Message) -> Mapping[int, str]:
        target = Path(request.text(2))
        unmount(target)
        if target.exists():
            target.rmdir()
        return {}

    def note_registration(self, request: protobuf.Message) -> Mapping[int, str]:
        if request.flag(1):
            self.places.registered.touch()
        else:
            print(f"The kubelet cannot register the driver: {request.text(2)}", flush=True)
        return {}


def serve(plugin: NodePlugin) -> None:
    server = grpc.server(ThreadPoolExecutor())
    for service, methods in plugin.services().items():
        handlers = {name: _handler(method) for name, method in methods.items()}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    # The kubelet may connect to the first as soon as it sees the second.
    for socket in (plugin.places.socket, plugin.places.registration_socket):
        socket.unlink(missing_ok=True)
        server.add_insecure_port(f"unix:{socket}")
    server.start()
    server.wait_for_termination()


def mount_points() -> list[str]:
    return [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]


def is_usable(target: Path) -> bool:
    """Whether something is mounted there and answers: a mount whose s3fs has ended does not."""
    if str(target) not in mount_points():
        return False
    try:
        next(target.iterdir(), None)
    except OSError:
        return False
    return str(target) in mount_points()


def unmount(target: Path) -> None:
    if str(target) in mount_points():
        subprocess.run(["umount", str(target)], check=True)


def _handler(method: Method) -> grpc.RpcMethodHandler[protobuf.Message, Mapping[int, str]]:
    return grpc.unary_unary_rpc_method_handler(
        lambda request, context: method(request), protobuf.decode, protobuf.encode
    )


def _wait_for_mount(target: Path, s3fs: subprocess.Popen[bytes]) -> None:
    deadline = monotonic() + MOUNT_TIMEOUT
    while str(target) not in mount_points():
        if s3fs.poll() is not None or monotonic() > deadline:
            raise RuntimeError("s3fs cannot mount. See the log of the driver.")
        sleep(0.02)
    # It is mounted before s3fs has checked the bucket.
    if not is_usable(target):
        raise RuntimeError("s3fs cannot read the bucket. See the log of the driver.")


def main(node: str, kubelet: str, endpoint: str, bucket: str) -> None:
    places = Places(Path(kubelet))
    serve(NodePlugin(node, Bucket(endpoint, bucket, places.passwords), places))


if __name__ == "__main__":
    main(*sys.argv[1:])
