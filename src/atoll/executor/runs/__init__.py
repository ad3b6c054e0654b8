"""
Runs: their processes, output, limits and results, and how their code talks to people.

A result stays in the journal until the control plane has acknowledged it.
"""
