"""Requests about sessions of other nodes: which node answers, and streaming the request there."""
