"""What is asked of the figures, in the order of the page on performance."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    name: str
    bound: float
    unit: str
    at_least: bool = False

    def met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound

    @property
    def asked(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.bound:,g} {self.unit}".strip()


EXECUTE = Goal("execute print(1) / posix_spawn of /bin/true", 2.2, "x")
THROUGHPUT = Goal("recorded executions a second, 16 sessions", 1000, "/s", at_least=True)
CREATE = Goal("create from the pool, seen by the client", 0.8, "ms")
CREATE_P99 = Goal("create from the pool, p99", 4, "ms")
COLD = Goal("create without a pool / python under bubblewrap", 1.0, "x")
BURST_P99 = Goal("50 creates at once, p99", 250, "ms")
BURST = Goal("50 creates at once, how many succeed", 50, "", at_least=True)
IDLE = Goal("idle sessions per GiB, before first use", 300, "", at_least=True)
IDLE_USED = Goal("idle sessions per GiB, after first use", 220, "", at_least=True)
NUMPY = Goal("numpy preloaded / execute print(1)", 2, "x")
DOCKER_EXEC = Goal("docker exec / execute print(1)", 20, "x", at_least=True)
ATOLL_RUN = Goal("atoll run -c 'print(1)', start to exit", 350, "ms")
EMBEDDED = Goal("a program with Atoll() and one result, start to exit", 300, "ms")
SERVER_START = Goal("server start to first response", 500, "ms")
GVISOR = Goal("gVisor on Docker, create and print(1) / docker run with gVisor", 1.0, "x")
GVISOR_BURST = Goal("the same, 20 at once", 1.0, "x")
KUBERNETES_COLD = Goal("session without a pool and print(1) / pod, watch and exec", 1.0, "x")
KUBERNETES_CLAIMS = Goal(
    "creates from the pool a second / writes of the API server", 1.0, "x", at_least=True
)
KUBERNETES_EXEC = Goal("exec over the Kubernetes API / execute print(1)", 20, "x", at_least=True)
KUBERNETES_REQUESTS = Goal("requests to the Kubernetes API of an execution", 0, "")
MARIADB = Goal("execute with MariaDB and Redis / SQLite", 1.5, "x")
POSTGRESQL = Goal("execute with PostgreSQL and Redis / SQLite", 1.5, "x")

GOALS = (
    EXECUTE, THROUGHPUT, CREATE, CREATE_P99, COLD, BURST_P99, BURST, IDLE, IDLE_USED, ATOLL_RUN,
    EMBEDDED, SERVER_START, GVISOR, GVISOR_BURST, KUBERNETES_COLD, KUBERNETES_CLAIMS,
    KUBERNETES_EXEC, KUBERNETES_REQUESTS, MARIADB, POSTGRESQL, DOCKER_EXEC, NUMPY,
)  # fmt: skip
