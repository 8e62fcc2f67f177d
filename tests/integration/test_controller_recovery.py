"""What a checkpoint notes of the groups in flight, against a real store."""

import json

from services.controller.durable.in_flight import decode_prompts, encode_prompts, prompts_in_flight
from tests.fixtures_store import StoreUnderTest


def test_prompts_in_flight_are_noted_and_a_group_dropped_meanwhile_is_left_out(
    store: StoreUnderTest,
) -> None:
    committed = store.committed(2)
    store.admit(2)
    store.rows.delete(list(committed[0].rows))  # the drop of group 0 is under way
    texts = encode_prompts(prompts_in_flight(store.ledger, store.rows, next_gid=3))
    noted = decode_prompts(json.loads(json.dumps(texts)))
    assert len(noted) == 2  # groups 1 and 2; group 3 came after the position was read
    assert noted[1].uid == "prompt-2"
