"""A bound of the machine, reached: no further file can be opened."""

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
