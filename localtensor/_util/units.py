"""Bytes and seconds in readable form."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """Bytes in units of powers of 1000, with three or four digits.

    >>> [bytes_text(count) for count in (0, 999, 999_960, 12_000_000, 3e15, 2**70)]
    ['0 B', '999 B', '1.0 MB', '12.0 MB', '3.0 PB', '1,180.6 EB']
    """
    if count < 999.5:
        return f"{count:.0f} B"
    for unit, size in (("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12), ("PB", 1e15)):
        if count / size < 999.95:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e18:,.1f} EB"


def time_text(seconds: float) -> str:
    """Microseconds with three digits, or a longer time with one decimal.

    >>> [time_text(seconds) for seconds in (0, 38e-6, 0.0021, 0.99999, 90, 86_400)]
    ['0 us', '38 us', '2.1 ms', '1.0 s', '90.0 s', '24.0 h']
    """
    if seconds < 0.0009995:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 0.99995:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 3600 else f"{seconds / 3600:,.1f} h"
