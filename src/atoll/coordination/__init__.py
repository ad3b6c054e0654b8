"""
Leases, approvals, cancellation, notifications and presence: what the replicas of a control plane
share.

`base` is the contract. `memory` implements it for replicas in one process, `redis` for replicas
anywhere that reach the same Redis. Nothing here is durable, and nothing here knows what a session
is.
"""
