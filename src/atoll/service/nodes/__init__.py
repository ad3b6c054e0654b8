"""Nodes of the API: reports, drains and moves; requests from one node to another."""
