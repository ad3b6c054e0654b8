"""Resource limits of an instance, and their notation: `"500m"`, `"512Mi"`, `"1Gi"`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from atoll.errors import InvalidRequest

_UNITS = {
    "": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([kKMGT]i?)?B?", re.ASCII)
_CPU = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)(m)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Resources:
    cpu: float
    """Cores; 0.5 is half of one core's time."""
    memory: int
    """Bytes."""
    disk: int
    """Bytes of the workspace."""
    max_processes: int
    """Processes and threads of user code."""


def parse_size(text: str, field: str) -> int:
    """Bytes from `"512Mi"`, `"1.5Gi"`, `"1000000"`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (size := int(float(match[1]) * _UNITS.get(match[2] or "", 1))) <= 0:
        raise InvalidRequest(
            f'{field}: {text[:40]!r} is not a size; write a number and Ki, Mi or Gi, like "512Mi".',
            field=field,
        )
    return size


def parse_cpu(text: str, field: str = "cpu") -> float:
    """Cores from `"1"`, `"0.5"`, `"500m"`."""
    match = _CPU.fullmatch(text.strip())
    cores = float(match[1]) / (1000 if match[2] else 1) if match else 0
    if cores <= 0:
        raise InvalidRequest(
            f'{field}: {text[:40]!r} is not a number of cores; write "1", "0.5" or "500m".',
            field=field,
        )
    return cores


def format_size(size: int) -> str:
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        if size % _UNITS[unit] == 0 and size >= _UNITS[unit]:
            return f"{size // _UNITS[unit]}{unit}"
    return str(size)


def format_cpu(cores: float) -> str:
    return f"{cores:g}"
