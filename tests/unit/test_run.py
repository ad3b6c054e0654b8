"""Which tests run in which variant."""

from __future__ import annotations

import pytest

from tests.run import KUBERNETES, LOCAL, by_variant

CLUSTER = "tests/kubernetes"
TEST = f"{CLUSTER}/test_cluster.py::test_pods_reach_the_tests"


@pytest.mark.parametrize(
    ("named", "local", "on_cluster"),
    [
        pytest.param(["tests/unit"], ["tests/unit"], None, id="local"),
        pytest.param([CLUSTER], None, [CLUSTER], id="cluster"),
        pytest.param([TEST], None, [TEST], id="one test on the cluster"),
        pytest.param(["tests/unit", TEST], ["tests/unit"], [TEST], id="both"),
        # With the local driver, their conftest.py skips those that need a cluster.
        pytest.param(["tests"], ["tests"], [CLUSTER], id="all"),
        pytest.param(["tests", TEST], ["tests"], [CLUSTER], id="all and one of them"),
    ],
)
def test_named_tests_run_in_the_variant_that_they_need(
    named: list[str], local: list[str] | None, on_cluster: list[str] | None
) -> None:
    runs = {variant.name: arguments for variant, arguments in by_variant([*named, "-x"], named)}
    expected = {LOCAL.name: local, KUBERNETES.name: on_cluster}
    assert runs == {name: [*paths, "-x"] for name, paths in expected.items() if paths}
