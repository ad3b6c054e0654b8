"""The storage contract (`base`), its implementation on SQL databases, and a stale-read cache."""
