"""
The program inside every instance: PID 1, which runs user code and serves the workspace's files.

It imports the standard library and `atoll.protocol` alone and supports Python 3.8, because users
bring the image that hosts it. Drivers bind both packages into the instance as one file (see
`drivers/shared/executor_bundle.py`).

Its processes are the supervisor (PID 1, owns the link, runs no user code), the zygote (a warm
interpreter that forks), the zygote's children (one for each run), and workers (one for each file
request that may take long).

Words: a *run* is one attempt of an execution on this instance, with the execution's id. A *job* is
the message that hands a run, or the start of a context, to a child of the zygote. A *stream* is one
request of a control plane.
"""
