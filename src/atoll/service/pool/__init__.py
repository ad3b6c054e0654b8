"""Warm pools of instances that are ready before a session needs them."""
