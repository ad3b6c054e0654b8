"""The feed of events: numbering, reading and following."""
