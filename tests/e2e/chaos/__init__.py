"""
Work while everything dies: a random load, random faults, and a checker of what was promised.

`plan` says by a seed what is asked when, and what is killed when; `world` is what is killed,
`clients` are those who ask, `history` is what they were told, and `checker` compares that with the
tokens that the code itself left in its workspace.
"""
