"""The way in for executors: reports of one instance, by its own token."""
