"""
The protocol between the control plane and an executor: frames, their encoding, and shared limits.

Shipped to every instance together with `atoll.executor`, so it imports the standard library alone
and runs on Python 3.8 or newer. docs/reference/executor-protocol.md describes the conversation.
"""
