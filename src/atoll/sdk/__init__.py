"""
The client: `AsyncAtoll`, and `Atoll`, which is derived from it by `scripts/generate-sync`.

It knows the wire, the errors and nothing of the server, except in `embedded`, which starts the
whole application inside this process and is then spoken to by the same wire.
"""
