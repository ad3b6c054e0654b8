"""Invocations: requests to run something, whose ids are stable through retries."""
