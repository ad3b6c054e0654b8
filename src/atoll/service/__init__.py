"""
What Atoll does, one package per noun of the API.

In each package `service.py` has one method per verb; the other modules are how it is done. Nothing
here knows HTTP or names a concrete back-end. The packages form an acyclic graph (see the layers in
`pyproject.toml`).
"""
