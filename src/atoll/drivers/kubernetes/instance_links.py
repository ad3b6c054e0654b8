"""
Opens links to the executors of pods: over TCP with TLS, to the pod's own address or to a port that
the API server forwards.

Both ends are known to each other before a request is sent: the control plane compares the
certificate's fingerprint with that of the instance, then it sends the instance's token.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import aiohttp

from atoll.drivers.kubernetes import credentials
from atoll.drivers.kubernetes.api import PORT_CHANNELS
from atoll.drivers.kubernetes.errors import ApiError
from atoll.drivers.kubernetes.pod_manifest import PORT
from atoll.drivers.shared import cgroups
from atoll.drivers.shared.executor_links import release_zygote
from atoll.link.client import Link
from atoll.link.errors import LinkLost

if TYPE_CHECKING:
    from datetime import timedelta

    from atoll.drivers.kubernetes.api import ApiClient
    from atoll.drivers.kubernetes.pod_state import PodState
    from atoll.link.transport import LinkTransport
    from atoll.model.instance import Handle
    from atoll.settings import LinkSettings

DATA, ERROR = 0, 1
"""Channels of a forwarded port."""
PORT_HEADER = 2
"""Bytes of the port's number, which begin each channel."""
CHUNK = 65_536
LAST_WORDS = 1.0
"""Seconds to receive what an executor sent before its pod ended."""


class InstanceLinks:
    def __init__(
        self, api: ApiClient, pods: str, secret: str, settings: LinkSettings, *, forwarded: bool
    ) -> None:
        """`pods` is the path of the namespace's pods."""
        self._api = api
        self._pods = pods
        self._secret = secret
        self._settings = settings
        self.forwarded = forwarded
        self._tls = credentials.client_context()
        self._forwards: set[asyncio.Task[None]] = set()
        self._refused: set[asyncio.Future[None]] = set()
        """Ends of links that were not given to anyone."""
        self._of_pods: dict[str, set[Link]] = {}
        """By the uid of the pod."""

    async def close(self) -> None:
        if self._refused:
            await asyncio.wait(self._refused)
        for task in self._forwards:
            task.cancel()
        if self._forwards:
            await asyncio.wait(self._forwards)

    async def open(self, handle: Handle, pod: PodState, *, timeout: timedelta) -> Link:
        """A link to the executor of a running pod, which can run user code from now on."""
        link = await self.connect(handle, pod, timeout=timeout)
        links = self._of_pods.setdefault(pod.uid, set())
        links.add(link)
        link.closed.add_done_callback(lambda _: self._forget(pod.uid, link))
        try:
            await release_zygote(link, cgroups.ControlGroups(), handle.instance_id)
        except BaseException:
            link.close()
            self._refused.add(link.closed)
            link.closed.add_done_callback(self._refused.discard)
            raise
        return link

    def pod_changed(self, pod: PodState) -> None:
        """
        Abort the links of a pod that has ended. Of some, such as a sandbox of gVisor that was
        killed, no end of the connection arrives.
        """
        if pod.ended:
            for link in self._of_pods.get(pod.uid, ()):
                asyncio.get_running_loop().call_later(LAST_WORDS, link.abort)

    def _forget(self, uid: str, link: Link) -> None:
        links = self._of_pods[uid]
        links.discard(link)
        if not links:
            del self._of_pods[uid]

    async def connect(self, handle: Handle, pod: PodState, *, timeout: timedelta) -> Link:
        expected = str(handle.data["certificate"])
        loop = asyncio.get_running_loop()

        async def dial(transport: LinkTransport) -> None:
            connected = await self._socket(pod)
            made, _ = await loop.create_connection(
                lambda: transport, sock=connected, ssl=self._tls, server_hostname=""
            )
            certificate = made.get_extra_info("ssl_object").getpeercert(binary_form=True)
            if credentials.fingerprint(certificate) != expected:
                made.abort()
                raise LinkLost(
                    f"What answers for instance {handle.instance_id} does not have its certificate."
                )

        return await Link.over(
            dial,
            f"pod {pod.name}",
            self._settings,
            timeout=timeout,
            token=credentials.token(self._secret, handle.instance_id),
        )

    async def _socket(self, pod: PodState) -> socket.socket:
        """A connected socket of the executor's port."""
        if self.forwarded:
            return await self._forward(pod.name)
        family = socket.AF_INET6 if ":" in pod.ip else socket.AF_INET
        connecting = socket.socket(family, socket.SOCK_STREAM)
        connecting.setblocking(False)
        connecting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await asyncio.get_running_loop().sock_connect(connecting, (pod.ip, PORT))
        except BaseException:
            connecting.close()
            raise
        return connecting

    # A port that the API server forwards

    async def _forward(self, name: str) -> socket.socket:
        """One end of a pair of sockets, whose other end a task connects to the pod."""
        try:
            stream = await self._api.stream(
                f"{self._pods}/{name}/portforward", [("ports", str(PORT))], PORT_CHANNELS
            )
        except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
            raise LinkLost(f"Cannot forward a port of pod {name}: {error}") from error
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        task = asyncio.create_task(_pump(stream, theirs), name=f"forward {name}")
        self._forwards.add(task)
        task.add_done_callback(self._forwards.discard)
        return ours


async def _pump(stream: aiohttp.ClientWebSocketResponse, end: socket.socket) -> None:
    """Copy between a stream of the API server and a socket, until either ends."""
    reader, writer = await asyncio.open_connection(sock=end, limit=CHUNK)
    try:
        tasks = [
            asyncio.create_task(_to_pod(reader, stream)),
            asyncio.create_task(_from_pod(stream, writer)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        writer.close()
        await stream.close()


async def _to_pod(reader: asyncio.StreamReader, stream: aiohttp.ClientWebSocketResponse) -> None:
    while data := await reader.read(CHUNK):
        await stream.send_bytes(bytes([DATA]) + data)


async def _from_pod(stream: aiohttp.ClientWebSocketResponse, writer: asyncio.StreamWriter) -> None:
    headers = {DATA: PORT_HEADER, ERROR: PORT_HEADER}
    async for message in stream:
        if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
            continue
        channel, data = message.data[0], message.data[1:]
        skipped = min(headers.get(channel, 0), len(data))
        if skipped:
            headers[channel] -= skipped
            data = data[skipped:]
        if channel != DATA and data:
            return  # The kubelet cannot reach the port any more.
        if data:
            writer.write(data)
            await writer.drain()
