"""A Redis server. It keeps nothing: what it held is gone once it ends."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from socket import create_connection
from typing import Self
from urllib.parse import quote

from tests.servers import free_port, program, until_ready
from tests.standstill import go_on, stand_still

SLOTS = 16384


class RedisServer:
    """`cluster` makes it a cluster of one: it has all slots. `host` is where it listens."""

    def __init__(
        self,
        directory: Path,
        *,
        cluster: bool = False,
        password: str | None = None,
        socket: bool = False,
        host: str = "127.0.0.1",
    ) -> None:
        self.directory = directory
        self.log = directory / "redis.log"
        self.host = host
        self.port = free_port()
        self.cluster = cluster
        self.password = password
        # Short, because the path of a socket is limited to 107 bytes.
        self.socket = Path(tempfile.mkdtemp(prefix="atoll-redis-")) / "socket" if socket else None
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        login = "" if self.password is None else f":{quote(self.password, safe='')}@"
        return f"redis://{login}{self.host}:{self.port}/0"

    @property
    def socket_url(self) -> str:
        login = "" if self.password is None else f"?password={quote(self.password, safe='')}"
        return f"unix://{self.socket}{login}"

    def start(self) -> Self:
        assert self.process is None, "it runs already"
        self.directory.mkdir(exist_ok=True)
        command = [
            program("redis-server", "redis-server"), "--bind", self.host,
            "--port", str(self.port), "--dir", str(self.directory), "--save", "",
            "--appendonly", "no",
        ]  # fmt: skip
        if self.password is not None:
            command += ["--requirepass", self.password]
        if self.socket is not None:
            command += ["--unixsocket", str(self.socket)]
        if self.cluster:
            # The bus usually has a port beyond the range of ports when the port is a high one.
            command += ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A Ctrl-C in the terminal is for the tests, which then end it.
                start_new_session=True,
            )
        until_ready(self._ready, self.process, self.log)
        return self

    def stop(self) -> None:
        """Let it end as it should, and wait for that."""
        self.resume()
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """It stays connected and connections are taken, but it answers nothing."""
        stand_still(self._running.pid)

    def resume(self) -> None:
        go_on(self._running.pid)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        if self.process is not None:
            self.kill()
        if self.socket is not None:
            shutil.rmtree(self.socket.parent)

    def execute(self, *command: str) -> str:
        """Send one command on a separate connection; returns at most 4 KiB of the raw response."""
        commands = [] if self.password is None else [["AUTH", self.password]]
        with create_connection((self.host, self.port), timeout=5) as connection:
            for words in [*commands, command]:
                sent = [f"*{len(words)}", *(f"${len(word)}\r\n{word}" for word in words), ""]
                connection.sendall("\r\n".join(sent).encode())
                answer = connection.recv(4096).decode()
        return answer

    def _ready(self) -> bool:
        try:
            if self.cluster:
                self.execute("CLUSTER", "ADDSLOTSRANGE", "0", str(SLOTS - 1))
                return "cluster_state:ok" in self.execute("CLUSTER", "INFO")
            return self.execute("PING") == "+PONG\r\n"
        except OSError:
            return False

    def _end(self, how: signal.Signals) -> None:
        self._running.send_signal(how)
        self._running.wait(60)
        self.process = None

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self.process is not None, "it does not run"
        return self.process
