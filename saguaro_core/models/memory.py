"""Gives memory that loading needed back to the system."""

import ctypes
import gc
import sys


def give_back() -> None:
    """Free what nothing refers to; the C library of Linux would keep the freed pages for this process."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # Not every C library has it.
        if trim is not None:
            trim(0)
