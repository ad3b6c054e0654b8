"""
Instances as containers of a Docker engine.

`driver.py` is the contract's implementation. Modules are named after objects of the Docker API or
after the part of the contract that they implement; nothing else in Atoll knows the engine's API.
"""
