"""Objects on local disk and S3 behind one interface. Not furnished yet."""
