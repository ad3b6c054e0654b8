"""The control plane's end of the connection to an executor."""
