"""A registry of images on loopback that requires a user name and a password."""

from __future__ import annotations

import base64
import json
import subprocess
from typing import TYPE_CHECKING, Self

import httpx

from tests.servers import free_port, program, until_ready
from tests.standstill import go_on, stand_still

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers.docker import Dockerd

USER, PASSWORD = "robin", "registry-pass-4711"
# In the format of `htpasswd -B`: the registry accepts only bcrypt.
ACCOUNTS = "robin:$2y$05$BC2DM/0UbfrUtppBAXbzEuQW7qbcwMLFDni4p0ENwlUmglXomciDi\n"
CONFIG = """
version: 0.1
log: {level: warn}
storage: {filesystem: {rootdirectory: PLACE/data}}
http: {addr: "127.0.0.1:PORT"}
auth: {htpasswd: {realm: atoll, path: PLACE/accounts}}
"""


class Registry:
    def __init__(self, directory: Path) -> None:
        self.log = directory / "registry.log"
        self._program = program("docker-registry", "docker-registry")
        self._config = directory / "registry.yml"
        self.server = f"127.0.0.1:{free_port()}"
        (directory / "accounts").write_text(ACCOUNTS)
        port = self.server.rpartition(":")[2]
        text = CONFIG.replace("PLACE", str(directory)).replace("PORT", port)
        self._config.write_text(text)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, "serve", str(self._config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until_ready(self._answers, self._process, self.log)
        return self

    def stop(self) -> None:
        if self._process is not None:
            self.resume()
            self._process.kill()
            self._process.wait(30)
            self._process = None

    def pause(self) -> None:
        """Let it hang: it accepts connections but does not answer."""
        assert self._process is not None
        stand_still(self._process.pid)

    def resume(self) -> None:
        assert self._process is not None
        go_on(self._process.pid)

    def put(self, engine: Dockerd, image: str, name: str) -> str:
        """Push an image of an engine and remove the tag there; returns the reference to pull."""
        reference = f"{self.server}/{name}"
        repository, _, tag = reference.rpartition(":")
        engine.ask("POST", f"/images/{image}/tag", params={"repo": repository, "tag": tag})
        given = {"username": USER, "password": PASSWORD, "serveraddress": self.server}
        auth = base64.urlsafe_b64encode(json.dumps(given).encode()).decode()
        pushed = engine.ask(
            "POST",
            f"/images/{repository}/push",
            params={"tag": tag},
            headers={"X-Registry-Auth": auth},
        )
        assert "errorDetail" not in pushed.text, pushed.text
        engine.ask("DELETE", f"/images/{reference}")
        return reference

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _answers(self) -> bool:
        try:
            return (
                httpx.get(f"http://{self.server}/v2/", timeout=5, verify=False).status_code == 401
            )
        except httpx.HTTPError:
            return False
