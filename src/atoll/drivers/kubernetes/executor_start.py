"""
Starts the executor of a pod: passes its configuration and its private key over `attach`, and waits
until it is ready.

A pod is started once. To start an instance again, another pod is made. An attempt that comes before
the container runs changes nothing.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

import aiohttp

from atoll.drivers.kubernetes.pod_state import CONTAINER
from atoll.errors import PermanentError
from atoll.link.errors import LinkLost

if TYPE_CHECKING:
    from atoll.drivers.kubernetes.api import ApiClient
    from atoll.drivers.kubernetes.credentials import KeyPair
    from atoll.drivers.shared.executor_config import ExecutorConfig

STDIN, STDOUT, STDERR, STATUS = range(4)
"""Channels of a stream: the first byte of each message."""
ASK, READY = b"key ", b"ready\n"
MAX_OUTPUT = 1024 * 1024
"""Bytes that a container may write before it is ready."""
MAX_ERROR_TEXT = 4000
"""Bytes at the end of the output that an error contains."""


class NotStarted(PermanentError):
    """The container wrote nothing: it does not run yet, or not any more."""

    code = "instance_failed"


async def start(
    api: ApiClient, pod: str, instance_id: str, config: ExecutorConfig, key: KeyPair
) -> str:
    """
    Return the pod's address as the executor reports it, or an empty text. `pod` is the path of the
    pod. Raises `NotStarted`; `PermanentError` if the container ends; `LinkLost` if the connection
    is lost.
    """
    stream = await _attach(api, pod)
    conversation = _Conversation(stream, instance_id, key)
    try:
        await stream.send_bytes(bytes([STDIN]) + config.line())
        return await conversation.run()
    except (aiohttp.ClientError, OSError) as error:
        if not conversation.size:
            raise NotStarted(f"Instance {instance_id} cannot be started: {error}") from error
        raise LinkLost(f"The connection to pod {pod} was lost while it started.") from error
    finally:
        # Not awaited for long: the kubelet may not answer.
        await stream.close()


async def _attach(api: ApiClient, pod: str) -> aiohttp.ClientWebSocketResponse:
    params = [("container", CONTAINER), *((name, "true") for name in ("stdin", "stdout", "stderr"))]
    return await api.stream(f"{pod}/attach", params)


class _Conversation:
    def __init__(
        self, stream: aiohttp.ClientWebSocketResponse, instance_id: str, key: KeyPair
    ) -> None:
        self._stream = stream
        self._instance_id = instance_id
        self._key = key
        self._output = b""
        self.size = 0
        """Bytes that the container has written."""

    async def run(self) -> str:
        stdout, address = b"", ""
        async for message in self._stream:
            if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                continue
            channel, data = message.data[0], message.data[1:]
            if channel == STATUS:
                break
            self._take(data)
            if channel != STDOUT:
                continue
            stdout += data
            if stdout.startswith(ASK) and stdout.endswith(b"\n"):
                address = _address(stdout.removeprefix(ASK).strip())
                await self._stream.send_bytes(bytes([STDIN]) + self._key.pem)
                stdout, self._output = b"", b""
            elif stdout == READY:
                return address
        text = self._output.decode(errors="replace").strip()
        failed = PermanentError if self.size else NotStarted
        raise failed(
            f"Instance {self._instance_id} ended while it started: {text or 'no output'}",
            code="instance_failed",
        )

    def _take(self, data: bytes) -> None:
        self.size += len(data)
        if self.size > MAX_OUTPUT:
            raise PermanentError(
                f"Instance {self._instance_id} wrote more than {MAX_OUTPUT} bytes before it was "
                "ready.",
                code="instance_failed",
            )
        self._output = (self._output + data)[-MAX_ERROR_TEXT:]


def _address(text: bytes) -> str:
    """
    An address that a pod may have; empty otherwise. The executor reports it, which the image could
    have replaced: nothing that is local to the control plane is accepted.
    """
    try:
        address = ipaddress.ip_address(text.decode())
    except ValueError:
        return ""
    forbidden = (
        address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or address.is_reserved
    )
    return "" if forbidden else str(address)
