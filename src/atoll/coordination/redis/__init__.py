"""
Coordination over Redis.

What must be atomic is one Lua script, timed by the server's clock. The keys of a script share the
hash tag `{prefix:id}`, hence one slot of a cluster, and every key has a time to live. Waiting tasks
are woken by pub/sub and also check periodically, because a message can be lost. `commands` sends,
`listener` receives, `leases` and `approvals` are the two parts that wait, and `coordination` puts
them together.
"""

from atoll.coordination.redis.coordination import RedisCoordination

__all__ = ["RedisCoordination"]
