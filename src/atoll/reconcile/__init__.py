"""What happens without a request: refill, expiry, recovery, the removal of what nobody owns."""
