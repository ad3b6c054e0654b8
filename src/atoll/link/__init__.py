"""
The control plane's client of the executor protocol. Nothing that an executor sends is trusted.
"""
