"""
The ways in from outside. A route checks the wire, calls one service method and writes the answer.
"""
