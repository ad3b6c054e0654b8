"""Leases, cancellation, approvals and queues between control planes. Not furnished yet."""
