"""
The Python client: `AsyncAtoll`, and `Atoll`, which `scripts/generate-sync` derives from it.

The client uses the REST API and imports nothing of the server. The exception is `embedded`, which
starts the application in this process and sends it the same requests.
"""
