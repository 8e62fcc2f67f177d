"""Bounds of the machine on open files."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_file_is_free() -> Iterator[None]:
    """This process opens no file and no pipe within, so it starts no process either."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def few_files() -> Iterator[None]:
    """This process, and what it starts within, may have 256 files open, and may raise that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
