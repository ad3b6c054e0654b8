"""The contract of drivers, on a cluster."""

from tests.contract.drivers.test_driver_contract import *  # noqa: F403 - all of its tests
