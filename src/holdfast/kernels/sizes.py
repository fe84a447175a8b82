"""Sizes of launches. Triton's own functions for these also work inside kernels, and take 7 microseconds outside."""


def cdiv(number: int, by: int) -> int:
    """How many of `by` hold `number`."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """The least that is no less; 1 for 0."""
    return 1 << max(number - 1, 0).bit_length()
