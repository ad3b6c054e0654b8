"""ASGI middleware around the routes: authentication, limits, idempotency and backpressure."""
