"""API keys, encryption of stored secrets, and signatures of tokens."""
