"""What a checkpoint notes of the groups in flight, against a real store."""

import base64
from collections.abc import Callable
from pathlib import Path

from rolecall.checkpoint.storage import open_storage
from rolecall.settings import RunSettings
from rolecall.v1.trajectory_pb2 import Prompt
from services.controller.durable.recovery import Recovery
from services.controller.durable.run_point import Checkpoints
from services.controller.threads import StoreThreads
from tests.fixtures_store import StoreUnderTest


async def test_prompts_in_flight_are_noted_and_a_group_dropped_meanwhile_is_left_out(
    store: StoreUnderTest, tmp_path: Path, make_settings: Callable[..., RunSettings]
) -> None:
    committed = store.committed(2)
    store.admit(2)
    store.rows.delete(list(committed[0].rows))  # the drop of group 0 is under way
    threads = StoreThreads()
    recovery = Recovery(
        make_settings(),
        store.ledger,
        store.rows,
        threads,
        [],
        Checkpoints(open_storage(str(tmp_path)), 1),
        0,
        lambda what: None,
    )
    noted = [Prompt.FromString(base64.b64decode(text)) for text in await recovery.untrained_prompts(next_gid=3)]
    threads.close()
    assert len(noted) == 2  # groups 1 and 2; group 3 came after the position was read
    assert noted[1].uid == "prompt-2"
