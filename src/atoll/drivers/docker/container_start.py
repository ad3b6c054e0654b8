"""
Starts a container: passes its configuration to the executor and waits until the executor is ready.

A container is started once. To start an instance again, another container is made.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from atoll.drivers.docker.engine import close_stream
from atoll.drivers.docker.errors import CONFLICT, NOT_FOUND, NOT_MODIFIED, ignored, translated
from atoll.errors import PermanentError
from atoll.link.errors import LinkLost

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from aiodocker.stream import Stream

    from atoll.drivers.docker.engine import Engine
    from atoll.drivers.shared.executor_config import ExecutorConfig

READY = b"ready\n"
STDOUT = 1
MAX_ERROR_TEXT = 4000
"""Bytes at the end of the output that an error contains."""
MAX_OUTPUT = 1024 * 1024
"""Bytes that a container may write before it is ready."""


async def start(
    engine: Engine,
    instance_id: str,
    container: str,
    config: ExecutorConfig,
    timeout: timedelta,
    started: Callable[[], None],
) -> Stream:
    """
    Returns the attached standard streams: an ephemeral executor ends when they are closed. Calls
    `started` when the container runs. Raises `PermanentError` if the container ends, and `LinkLost`
    if the executor does not become ready.
    """
    handle = engine.docker.containers.container(container)
    stream = handle.attach(stdin=True, stdout=True, stderr=True)
    deadline = asyncio.get_running_loop().time() + timeout.total_seconds()
    try:
        with translated():
            async with asyncio.timeout_at(deadline):
                # Attach first, so that no output is missed and no input is waited for.
                await stream._init()
                await stream.write_in(config.line())
                await handle.start()
                started()
            try:
                async with asyncio.timeout_at(deadline):
                    await _wait_until_ready(engine, instance_id, container, stream)
            except TimeoutError:
                # Not a failure of the engine: the image is slow on every node.
                raise LinkLost(
                    f"The executor of instance {instance_id} was not ready within "
                    f"{timeout.total_seconds():g} s."
                ) from None
    except BaseException:
        await close_stream(stream)
        raise
    return stream


async def _wait_until_ready(
    engine: Engine, instance_id: str, container: str, stream: Stream
) -> None:
    output, size = b"", 0
    while (message := await stream.read_out()) is not None:
        if message.stream == STDOUT and message.data == READY:
            return
        output = (output + message.data)[-MAX_ERROR_TEXT:]
        size += len(message.data)
        if size > MAX_OUTPUT:
            raise PermanentError(
                f"Instance {instance_id} wrote more than {MAX_OUTPUT} bytes before it was ready.",
                code="instance_failed",
            )
    # The stream ends with the container or with the connection to the engine. In the second case
    # this request fails with `EngineUnavailable`.
    with ignored(NOT_FOUND, CONFLICT, NOT_MODIFIED):
        await engine.call("POST", f"containers/{container}/wait")
    text = output.decode(errors="replace").strip()
    raise PermanentError(
        f"Instance {instance_id} ended while it started: {text or 'no output'}",
        code="instance_failed",
    )
