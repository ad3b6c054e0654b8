"""
Control groups of instances, version 1 and version 2.

An instance has a group, and in it one named `exec` for user code. Memory and processes of user code
are limited without the supervisor, so that user code runs out of them first. Where the kernel has a
freezer, an instance can be frozen, the supervisor included. All calls are blocking file work of
microseconds to milliseconds; callers use a thread.
"""

from atoll.drivers.shared.cgroups.base import (
    OVERHEAD,
    OWN_PROCESSES,
    ControlGroups,
    GroupBusy,
    enter,
    kill_all,
    kill_and_remove,
    uncharged_sockets,
)
from atoll.drivers.shared.cgroups.find import (
    OWN_GROUP,
    enter_leaf,
    find,
    node_groups,
    own_path,
)
from atoll.drivers.shared.cgroups.v1 import CgroupV1
from atoll.drivers.shared.cgroups.v2 import CgroupV2

__all__ = [
    "OVERHEAD",
    "OWN_GROUP",
    "OWN_PROCESSES",
    "CgroupV1",
    "CgroupV2",
    "ControlGroups",
    "GroupBusy",
    "enter",
    "enter_leaf",
    "find",
    "kill_all",
    "kill_and_remove",
    "node_groups",
    "own_path",
    "uncharged_sockets",
]
