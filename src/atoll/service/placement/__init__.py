"""Decides which node gets a session, and whether this node accepts it."""
