"""REST under /api/v1, and the probes beside it."""
