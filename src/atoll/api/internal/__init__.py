"""Routes below /internal: callbacks of executors, and probes of other nodes."""
