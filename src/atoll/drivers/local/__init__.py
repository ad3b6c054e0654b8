"""This machine as a node: bubblewrap, control groups and host uids."""
