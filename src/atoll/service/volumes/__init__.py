"""Volumes that several sessions share."""
