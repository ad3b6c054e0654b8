"""Quantities of the Kubernetes API, such as 500m or 128Mi."""

from __future__ import annotations

from functools import lru_cache

SUFFIXES = {
    "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12,
    "Ki": 1024.0, "Mi": 1024.0**2, "Gi": 1024.0**3, "Ti": 1024.0**4,
}  # fmt: skip


@lru_cache(1024)
def quantity(text: str) -> float:
    """Raises `ValueError` if the text is not a quantity."""
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if text.endswith(suffix):
            return round(float(text[: -len(suffix)]) * SUFFIXES[suffix], 3)
    return round(float(text), 3)
