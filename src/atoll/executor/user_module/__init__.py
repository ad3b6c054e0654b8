"""
The module that user code in a sandbox can import, and the command that it can call.

Drivers copy it into the sandbox (`drivers/shared/executor_bundle.py`); nothing of Atoll imports it.
"""
