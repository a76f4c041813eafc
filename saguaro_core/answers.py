"""Comparing answers token by token."""

from collections.abc import Sequence


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which two answers differ, where one ends if that is all, or None when they are the same."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))
