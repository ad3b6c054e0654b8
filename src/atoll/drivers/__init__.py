"""
The code that makes, watches and removes instances, one module or package for each kind of node.
"""
