"""
In-memory back-ends and a clock for tests.

They fulfil the same contracts as the real back-ends and pass the same test suites. Use them to test
code that works with a store, coordination, blobs or the time. To test a program that uses Atoll as
a library, use `Atoll()` itself: it needs no server (docs/how-to/test-with-atoll.md).
"""

from __future__ import annotations

from atoll.testing.backends import memory_blobs, memory_coordination, memory_store
from atoll.testing.clock import ManualClock

__all__ = ["ManualClock", "memory_blobs", "memory_coordination", "memory_store"]
