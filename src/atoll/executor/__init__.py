"""
The program inside every instance: PID 1, which runs user code and serves the workspace's files.

It imports the standard library alone and runs on Python 3.8 or newer, because the image that hosts
it is the user's. Drivers bind it into the instance as one file (see
`drivers/shared/executor_bundle.py`). The kinds
of process: the supervisor (PID 1, holds the link, runs no user code), the zygote (a warm
interpreter that forks), the zygote's children, one an execution, and the supervisor's workers, one
a request about files that may take long.
"""
