"""
Work that no request starts: reconcilers, sweeps, pool refill, recovery and reports.

A reconciler gets ids only and reads the state itself. Notifications are hints; the sweeps are the
truth.
"""
