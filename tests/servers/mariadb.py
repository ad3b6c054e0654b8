"""A MariaDB server."""

from __future__ import annotations

import signal
import socket
import subprocess

from tests.servers import program
from tests.servers.process import PASSWORD, USER, DatabaseServer

PACKAGE = "mariadb-server"


class MariaDB(DatabaseServer):
    scheme = "mysql"
    stop_signal = signal.SIGTERM

    def _prepare(self, log: int) -> None:
        self._run(
            [
                program("mariadb-install-db", PACKAGE), "--no-defaults", "--skip-test-db",
                "--skip-name-resolve", "--auth-root-authentication-method=normal",
                # Its temporary files are named by process id, which several sandboxes share.
                f"--datadir={self.place / 'data'}", f"--tmpdir={self.place}",
            ],
            log,
        )  # fmt: skip

    def _command(self) -> list[str]:
        tls = []
        if self.tls is not None:
            tls = [
                f"--ssl-cert={self.tls.certificate}", f"--ssl-key={self.tls.key}",
                f"--ssl-ca={self.tls.authority}", "--require-secure-transport=ON",
            ]  # fmt: skip
        return [
            program("mariadbd", PACKAGE), "--no-defaults", f"--datadir={self.place / 'data'}",
            f"--socket={self.place / 'socket'}", f"--pid-file={self.place / 'pid'}",
            f"--tmpdir={self.place}",
            f"--bind-address={self.host}", f"--port={self.port}", "--skip-name-resolve",
            # As Debian sets it.
            "--character-set-server=utf8mb4", "--collation-server=utf8mb4_general_ci",
            # Written at each commit but not synced: that survives the server, not a power cut.
            "--innodb-flush-log-at-trx-commit=2", "--innodb-flush-method=nosync",
            "--innodb-log-file-size=32M", "--innodb-buffer-pool-size=64M",
            "--innodb-buffer-pool-load-at-startup=OFF",
            "--innodb-buffer-pool-dump-at-shutdown=OFF", "--performance-schema=OFF", *tls,
        ]  # fmt: skip

    def _ready(self) -> bool:
        """Whether it greets, in its protocol's version 10."""
        try:
            with socket.create_connection((self.host, self.port), timeout=5) as connection:
                return connection.recv(5)[4:] == b"\x0a"
        except OSError:
            return False

    def _create_user(self) -> None:
        self.execute(
            f"CREATE USER {USER}@'%' IDENTIFIED BY '{PASSWORD}';"
            f"GRANT ALL ON `atoll%`.* TO {USER}@'%';"
        )

    def _create_database(self, name: str) -> None:
        self.execute(f"CREATE DATABASE {name}")

    def execute(self, sql: str) -> None:
        """As root."""
        subprocess.run(
            [
                program("mariadb", PACKAGE), "--no-defaults", "--user=root",
                f"--socket={self.place / 'socket'}", f"--execute={sql}",
            ],
            check=True,
        )  # fmt: skip
