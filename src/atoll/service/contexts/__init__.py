"""Contexts: stateful interpreters of a session."""
