"""A server of an ordinary user whose systemd gives no control group."""

from __future__ import annotations

import json
import os
import socket

from tests import unprivileged

REFUSES = """\
#!/bin/sh
echo 'Call failed: Access denied' >&2
exit 1
"""


def test_a_server_without_a_control_group_starts_and_logs_the_reason(bubblewrap: str) -> None:
    unprivileged.require()
    with unprivileged.directory() as home, socket.socket(socket.AF_UNIX) as bus:
        for name in ("data", "bin", "cgroup"):
            (home / name).mkdir(mode=0o755)
        if unprivileged.ROOT:
            os.chown(home / "data", unprivileged.UID, unprivileged.UID)
        program = home / "bin/busctl"
        program.write_text(REFUSES)
        program.chmod(0o755)
        (home / "cgroup/cgroup.controllers").write_text("cpu memory pids")
        bus.bind(str(home / "bus"))
        (home / "bus").chmod(0o777)
        bus.listen()
        env = {
            "PATH": f"{home}/bin:{os.environ['PATH']}",
            "XDG_RUNTIME_DIR": str(home),
            "ATOLL_LOCAL__CGROUP_ROOT": str(home / "cgroup"),
            "ATOLL_LOCAL__DELEGATION": "true",
        }
        server = unprivileged.UnprivilegedServer(home / "data", "--json", **env)
        with server, server.client() as http:
            assert http.get("/ready").status_code == 200
            events = [json.loads(line) for line in server.stderr().splitlines()]
        (event,) = [event for event in events if event["event"].startswith("cgroups.")]
        assert event["event"] == "cgroups.not_delegated"
        assert event["level"] == "warning"
        # The other reasons are tested in component/drivers/test_cgroup_delegation.py.
        assert "loginctl enable-linger" in event["reason"]
