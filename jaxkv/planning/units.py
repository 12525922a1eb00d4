"""Bytes as people write them. GiB is 2^30 bytes, GB is 10^9: memory is sold in GB, and everything here is told in both."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30
GB = 10**9


def gib(num_bytes: float) -> float:
    """Returns GiB (2^30 bytes)."""
    return num_bytes / GIB


def gb(num_bytes: float) -> float:
    """Returns GB (10^9 bytes)."""
    return num_bytes / GB


def both(num_bytes: float) -> str:
    """Returns a size in GiB and GB, such as "1.00 GiB (1.07 GB)"; in MiB and MB where it is small."""
    if abs(num_bytes) < GIB / 10:
        return f"{num_bytes / MIB:,.2f} MiB ({num_bytes / 1e6:,.2f} MB)"
    return f"{gib(num_bytes):,.2f} GiB ({gb(num_bytes):,.2f} GB)"


def count(n: int, what: str = "sequence") -> str:
    """Returns a number of things, such as "1 sequence" or "1,024 sequences"."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def ms(seconds: float) -> str:
    """Returns a time in ms, or in s from a second on."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.2f} ms"
