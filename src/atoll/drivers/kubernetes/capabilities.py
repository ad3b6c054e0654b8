"""What a cluster provides, from its settings and from what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.model.instance import Capabilities
from atoll.model.template import REQUIREMENTS

if TYPE_CHECKING:
    from atoll.settings import KubernetesSettings

PROVIDED = frozenset({"own_uid", "cgroup_memory", "cgroup_cpu", "seccomp"})
UNAVAILABLE = {
    "packages": "instances of a cluster share no directory with Atoll; put packages in the image",
    "volumes": "the cluster has no claim with the bucket (kubernetes.bucket_claim)",
    "pausing": "a cluster cannot freeze pods",
}


def find_capabilities(settings: KubernetesSettings) -> Capabilities:
    provided = PROVIDED
    if not settings.open_network:
        # Otherwise no instance is made where network policies are not enforced.
        provided |= {"no_network"}
    missing = {name: text for name, text in REQUIREMENTS.items() if name not in provided}
    unavailable = dict(UNAVAILABLE)
    if settings.bucket_claim:
        del unavailable["volumes"]
    return Capabilities(provided, missing, unavailable)
