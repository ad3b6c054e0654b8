"""The engine for SQLite: one writer thread with group commit, and a few reader threads."""
