"""Files of sessions, in a running workspace or in a checkpoint, and signed URLs for them."""
