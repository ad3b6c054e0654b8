"""
Coordination over Redis.

All that must happen at once happens in one script on the server, by the server's clock. The keys of
a script share the hash tag `{prefix:id}`, hence one slot of a cluster, and every key has a time to
live. Those who wait are woken by pub/sub and look again now and then as well, since a message can
be lost. `commands` sends, `ear` hears, `leases` and `approvals` are the two subjects with waiting
in them, `coordination` is the face.
"""

from atoll.coordination.redis.coordination import RedisCoordination

__all__ = ["RedisCoordination"]
