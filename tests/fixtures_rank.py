"""Fixture `one_rank`: what an engine inside the tests' own process needs."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A default process group of one, unless an earlier test made one."""
    import torch.distributed as dist

    from rolecall.training.ranks.device import RankSpec, start_rank, stop_rank

    mine = not dist.is_initialized()
    if mine:
        start_rank(
            RankSpec(rank=0, world_size=1, local_rank=0, devices=(), rendezvous=None, num_threads=1, timeout_s=60.0)
        )
    yield
    if mine:
        stop_rank()
