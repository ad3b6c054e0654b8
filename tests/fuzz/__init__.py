"""A fuzzer that plays the executor, and the invariants that must hold."""
