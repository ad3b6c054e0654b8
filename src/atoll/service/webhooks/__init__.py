"""Webhooks, and how one event is delivered to one of them."""
