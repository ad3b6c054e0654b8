"""Consoles of executions over WebSockets."""
