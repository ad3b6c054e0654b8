"""A PostgreSQL server."""

from __future__ import annotations

import glob
import signal
import subprocess

from tests.servers import program
from tests.servers.process import PASSWORD, USER, DatabaseServer


def postgres_program(name: str) -> str:
    newest_first = sorted(glob.glob("/usr/lib/postgresql/*/bin"), reverse=True)
    return program(name, "postgresql", *newest_first)


class PostgreSQL(DatabaseServer):
    scheme = "postgresql"
    stop_signal = signal.SIGINT  # "Fast shutdown": it does not wait for clients to leave.

    def _prepare(self, log: int) -> None:
        data = self.place / "data"
        self._run(
            [
                postgres_program("initdb"), f"--pgdata={data}", "--username=postgres",
                "--auth=trust", "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync",
            ],
            log,
        )  # fmt: skip
        kind = "host" if self.tls is None else "hostssl"
        (data / "pg_hba.conf").write_text(
            f"local all postgres trust\n{kind} all all all scram-sha-256\n"
        )

    def _command(self) -> list[str]:
        settings = {
            "listen_addresses": self.host,
            "port": str(self.port),
            "unix_socket_directories": str(self.place),
            # What was written survives the server, not a power cut.
            "fsync": "off",
            "wal_level": "minimal",
            "max_wal_senders": "0",
            "shared_buffers": "16MB",
            "dynamic_shared_memory_type": "mmap",
        }
        if self.tls is not None:
            settings |= {
                "ssl": "on",
                "ssl_cert_file": str(self.tls.certificate),
                "ssl_key_file": str(self.tls.key),
                "ssl_ca_file": str(self.tls.authority),
            }
        options = [word for name in settings for word in ("-c", f"{name}={settings[name]}")]
        return [postgres_program("postgres"), "-D", str(self.place / "data"), *options]

    def _ready(self) -> bool:
        """Whether it wrote that with its own pid."""
        try:
            lines = (self.place / "data" / "postmaster.pid").read_text().split("\n")
        except FileNotFoundError:
            return False
        return lines[0] == str(self._running.pid) and lines[7:8] == ["ready   "]

    def _create_user(self) -> None:
        self.execute(f"CREATE USER {USER} PASSWORD '{PASSWORD}'")

    def _create_database(self, name: str) -> None:
        self.execute(f"CREATE DATABASE {name} OWNER {USER}")

    def _tidy(self) -> None:
        try:
            lines = (self.place / "data" / "postmaster.pid").read_text().split("\n")
        except FileNotFoundError:
            return
        # It marks its data directory with a segment of shared memory, which outlives a kill.
        for segment in lines[6].split()[1:]:
            subprocess.run(["ipcrm", "--shmem-id", segment], check=True)

    def execute(self, sql: str) -> None:
        """As the superuser."""
        subprocess.run(
            [
                postgres_program("psql"), "--no-psqlrc", "--quiet", "--username=postgres",
                f"--host={self.place}", f"--port={self.port}", f"--command={sql}",
            ],
            check=True,
        )  # fmt: skip
