"""Resident memory for tests that measure it."""

import mmap


def use_memory(num_bytes: int) -> None:
    """Makes `num_bytes` resident and gives them back to the kernel.

    The pages are new ones: an allocator may serve an array from memory that it kept, which is resident already.
    """
    with mmap.mmap(-1, num_bytes) as pages:
        for offset in range(0, num_bytes, mmap.PAGESIZE):
            pages[offset] = 1
