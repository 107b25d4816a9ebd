"""Integer arithmetic of the host. Triton's own ``cdiv`` takes microseconds, and a launch needs several."""

from __future__ import annotations


def cdiv(dividend: int, divisor: int) -> int:
    """``dividend / divisor``, rounded up; both positive."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least ``number``, which is positive."""
    return 1 << (number - 1).bit_length()
