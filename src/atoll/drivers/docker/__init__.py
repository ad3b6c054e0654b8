"""Instances as containers of a Docker engine."""
