"""Which node a session goes to, and whether this node accepts it."""
