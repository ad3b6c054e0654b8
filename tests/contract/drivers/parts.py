"""Optional parts of a driver, for tests on nodes that have them."""

from __future__ import annotations

from atoll.drivers.base import Driver, Pausing, Resizing, Volumes


def pausing_of(driver: Driver) -> Pausing:
    assert driver.pausing is not None, driver.capabilities.unavailable
    return driver.pausing


def resizing_of(driver: Driver) -> Resizing:
    assert driver.resizing is not None, driver.capabilities.unavailable
    return driver.resizing


def volumes_of(driver: Driver) -> Volumes:
    assert driver.volumes is not None, driver.capabilities.unavailable
    return driver.volumes
