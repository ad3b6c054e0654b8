"""
The Python processes that run user code: the zygote, its children, and interpreters of contexts.

Everything after the fork runs with the rights of user code. The supervisor trusts none of it.
"""
