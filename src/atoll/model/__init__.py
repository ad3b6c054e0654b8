"""
Frozen dataclasses and pure decisions.

Nothing here awaits, reads a clock or touches the outside: what a function needs, the time included,
is an argument. An entity has one shape, this one; the table and the wire schema follow it.
"""
