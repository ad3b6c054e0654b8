"""A fuzzer that plays executor: what it sends, and what must hold whatever that is."""
