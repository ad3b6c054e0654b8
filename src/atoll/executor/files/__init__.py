"""
The workspace's files: requests about them, staged files, artifacts, and transfer of checkpoints.

No path leads out of the workspace, whatever user code does to its files at the same time.
"""
