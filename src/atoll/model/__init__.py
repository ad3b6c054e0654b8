"""
Entities as frozen dataclasses, and decisions as pure functions.

Nothing here awaits, reads a clock or does I/O: everything that a function needs, the time included,
is an argument. Entities have no other shape inside Atoll; rows and wire schemas derive from them.
"""
