"""What a cluster provides, from its settings and from what was measured."""

from __future__ import annotations

from atoll.model.instance import Capabilities
from atoll.model.template import REQUIREMENTS

PROVIDED = frozenset({"own_uid", "cgroup_memory", "cgroup_cpu", "seccomp"})
UNAVAILABLE = {
    "packages": "instances of a cluster share no directory with Atoll; put packages in the image",
    "volumes": "instances of a cluster cannot mount volumes of Atoll",
    "pausing": "a cluster cannot freeze pods",
}


def find_capabilities() -> Capabilities:
    missing = {name: text for name, text in REQUIREMENTS.items() if name not in PROVIDED}
    return Capabilities(PROVIDED, missing, UNAVAILABLE)
