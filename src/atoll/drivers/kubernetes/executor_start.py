"""
Starts the executor of a pod: passes its configuration and its private key over `attach`, and waits
until it is ready.

A pod is started once. To start an instance again, another pod is made.
"""

from __future__ import annotations

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
ASK, READY = b"key\n", b"ready\n"
MAX_OUTPUT = 1024 * 1024
"""Bytes that a container may write before it is ready."""
MAX_ERROR_TEXT = 4000
"""Bytes at the end of the output that an error contains."""


async def start(
    api: ApiClient, pod: str, instance_id: str, config: ExecutorConfig, key: KeyPair
) -> None:
    """
    `pod` is the path of a pod whose container runs. Raises `PermanentError` if it ends, and
    `LinkLost` if the connection is lost.
    """
    stream = await _attach(api, pod)
    try:
        await stream.send_bytes(bytes([STDIN]) + config.line())
        await _converse(stream, instance_id, key)
    except (aiohttp.ClientError, OSError) as error:
        raise LinkLost(f"The connection to pod {pod} was lost while it started.") from error
    finally:
        await stream.close()


async def _attach(api: ApiClient, pod: str) -> aiohttp.ClientWebSocketResponse:
    params = [("container", CONTAINER), *((name, "true") for name in ("stdin", "stdout", "stderr"))]
    return await api.stream(f"{pod}/attach", params)


async def _converse(
    stream: aiohttp.ClientWebSocketResponse, instance_id: str, key: KeyPair
) -> None:
    stdout, output, size = b"", b"", 0
    async for message in stream:
        if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
            continue
        channel, data = message.data[0], message.data[1:]
        if channel == STATUS:
            break
        size += len(data)
        if size > MAX_OUTPUT:
            raise PermanentError(
                f"Instance {instance_id} wrote more than {MAX_OUTPUT} bytes before it was ready.",
                code="instance_failed",
            )
        output = (output + data)[-MAX_ERROR_TEXT:]
        if channel != STDOUT:
            continue
        stdout += data
        if stdout == ASK:
            await stream.send_bytes(bytes([STDIN]) + key.pem)
            stdout, output = b"", b""
        elif stdout == READY:
            return
    text = output.decode(errors="replace").strip()
    raise PermanentError(
        f"Instance {instance_id} ended while it started: {text or 'no output'}",
        code="instance_failed",
    )
