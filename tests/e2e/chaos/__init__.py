"""
Work while processes die: a random load, random faults, and a checker of the guarantees.

`plan` derives requests and faults from a seed, `world` runs the processes that are killed,
`clients` send the requests, `history` records their responses, and `checker` compares these with
the tokens that the code left in its workspace.
"""
