"""Volumes of a node, on its disk or in the bucket, and the mounts that show them to instances."""
