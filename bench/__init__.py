"""Benchmarks: Atoll beside the floors of this machine, in one run, as ratios."""
