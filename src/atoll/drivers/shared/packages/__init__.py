"""Python package environments of a node: how they are installed, checked, kept and removed."""
