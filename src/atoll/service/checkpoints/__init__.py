"""Checkpoints: workspaces stored in the blob store. Take, verify, restore and remove them."""
