"""Blobs (bytes by key) on local disk and S3 behind one interface; `base` is the contract."""
