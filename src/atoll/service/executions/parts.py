"""What the modules of this package share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.service.executions.approvals import Approvals
    from atoll.service.executions.completion import Completions
    from atoll.service.executions.offload import Offload


@dataclass(frozen=True)
class ExecutionParts:
    completions: Completions
    offload: Offload
    approvals: Approvals
