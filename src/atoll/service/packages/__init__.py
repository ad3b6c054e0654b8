"""Python packages of sessions and templates, and the proxy through which they are installed."""
