"""Whatever is sent to any method of any service, the servers answer with an error that says whose mistake it is, and go
on.
"""

from pathlib import Path
from typing import Any

import grpc
import pytest

from rolecall.reward import SERVICE_NAME, Scorer, description, new_server, one_by_one
from rolecall.rpc.decoding import MAX_PARTS
from rolecall.settings import RpcSection
from rolecall.v1 import reward_pb2
from tests.conftest import MakeSettings
from tests.fixtures_store import StoreUnderTest
from tests.hostile.servers import all_services
from tests.hostile.siege import Siege

NUM_BODIES = 1_200
MAX_GROWTH_BYTES = 256 * 2**20
"""Of caches, threads and what the run beside it keeps."""
MAX_PEAK_BYTES = 4 * 2**30
"""One message of the largest size takes a gigabyte when all of it is empty parts, on this side and on the servers'."""


async def test_bad_bodies_to_every_method_are_answered_with_typed_errors(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with all_services(store, tmp_path, make_settings) as served:
        # a server refuses what is too large before it looks at the method
        num_services = len({target.method.containing_service.full_name for target in served.targets})
        found = await Siege(served, seed=5).run(NUM_BODIES, num_large=num_services, num_bombs=1)
    assert not found.problems, found.table()
    assert found.rss_bodies - found.rss_before < MAX_GROWTH_BYTES
    assert found.rss_peak - found.rss_before < MAX_PEAK_BYTES


async def test_bytes_that_are_no_request_and_requests_of_too_many_parts_are_the_caller_s_mistake() -> None:
    spec = description("half", (0, 1), ("response_text",), {}, False, max_items=0)
    server = new_server(Scorer(spec, one_by_one(lambda item: 0.5, spec), None), "127.0.0.1:0", RpcSection())
    address = await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        score: Any = channel.unary_unary(f"/{SERVICE_NAME}/Score")
        for data, words in (
            (b"\xff", "/rolecall.v1.RewardService/Score was sent 1 bytes that are not its request"),
            (b"\x0a\x00" * (MAX_PARTS + 1), f"items has {MAX_PARTS + 1} elements; send at most {MAX_PARTS} at a time"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await score(data, timeout=60)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert words in (caught.value.details() or "")
        item = reward_pb2.ScoreItem(id="1", response_text="x")
        answer = await score(reward_pb2.ScoreRequest(items=[item]).SerializeToString(), timeout=60)
    assert reward_pb2.ScoreResponse.FromString(answer).results[0].HasField("reward")
    await server.drain(0.0)
