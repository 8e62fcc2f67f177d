"""Episodes as they were recorded, trained on again without their environment: every bit is the same."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rolecall.settings import RunSettings
from rolecall.training.objective.objectives import PolicyObjective, policy_columns
from rolecall.training.packing.pack import local_counts, pack
from rolecall.training.packing.pieces import Piece
from rolecall.trajectory import SAMPLED_COLUMNS, decode_column, is_truncated, segment_lengths
from rolecall.v1.trajectory_pb2 import CommittedGroup, RowRef, TrainBatch, TrajectoryMeta
from rolecall.wire import Array
from services.controller.groups.assembly import ScoredGroup
from services.controller.step.preparation import prepare
from tests.conftest import MakeSettings
from tests.contract.test_rollout_harness import Compacting, Talker, played
from tests.fixtures_store import StoreUnderTest
from tests.integration.fsdp_oracle import CPU, make_engine
from tests.tiny_tokenizer import write_tokenizer

pytestmark = pytest.mark.usefixtures("one_rank")


def scored(store: StoreUnderTest, group: CommittedGroup) -> ScoredGroup:
    """What the controller knows of a group whose reward is the environment's, and of some noise."""
    metas = store.rows.read_meta(group.rows)
    size, noise = len(metas), np.random.default_rng(group.gid).normal(size=len(metas))
    rewards = np.array([meta.episode.reward.value for meta in metas]) + noise
    truncated = np.array([is_truncated(meta) for meta in metas])
    raw = rewards.astype(np.float32)
    return ScoredGroup(group.gid, tuple(group.rows), 0, raw, raw, {}, np.full(size, 1, np.int32), truncated, 0, 0, 0)


def trained(
    store: StoreUnderTest, groups: Sequence[CommittedGroup], settings: RunSettings, model: Path
) -> tuple[TrainBatch, list[dict[str, Array]], dict[str, float], float]:
    """The batch that is sealed, what is written to its rows, and the metrics and gradient of a step on them."""
    refs = [ref for group in groups for ref in group.rows]
    rows = store.rows.read(refs, SAMPLED_COLUMNS)
    batch, columns = prepare(settings, 0, [scored(store, group) for group in groups], rows)
    segments, trajectories = list[dict[str, Array]](), list[int]()
    for number, (ref, row, more) in enumerate(zip(refs, rows, columns, strict=True)):
        own = Piece(number, 0, segment_lengths(ref)).segments({**row, **more, "old_logprobs": row["rollout_logprobs"]})
        segments += own
        trajectories += [number] * len(segment_lengths(ref))
    packed = pack(segments, policy_columns(settings.algorithm), temperature=1.0, device=CPU, trajectories=trajectories)
    counts = local_counts(segments, trajectories=trajectories)
    engine = make_engine(model)
    metrics = engine.forward_backward([packed], PolicyObjective(settings.algorithm, counts, batch.coefficients, 1))
    return batch, columns, metrics.values(), engine.step().grad_norm


@pytest.mark.parametrize("agent", [Talker, Compacting])
async def test_rows_written_back_from_a_dump_give_the_same_batch_loss_and_gradient(
    store: StoreUnderTest,
    tmp_path: Path,
    make_settings: MakeSettings,
    models: dict[str, Path],
    agent: type[Talker] | type[Compacting],
) -> None:
    write_tokenizer(tmp_path)
    await played(store, tmp_path, agent, num=2)
    groups = [group for _, group in store.ledger.read_committed("0", 10, 0)]
    num_segments = {1 + len(ref.segment_starts) for group in groups for ref in group.rows}
    assert num_segments == ({1} if agent is Talker else {3})
    settings = make_settings(algorithm={"groups_per_batch": 2, "policy_loss": {"kind": "gspo"}})
    before = trained(store, groups, settings, models["dense"])
    refs = [ref for group in groups for ref in group.rows]
    dump = [
        (ref.SerializeToString(), {name: array.tobytes() for name, array in row.items()}, meta.SerializeToString())
        for ref, row, meta in zip(refs, store.rows.read(refs, SAMPLED_COLUMNS), store.rows.read_meta(refs), strict=True)
    ]
    messages = [group.SerializeToString() for group in groups]
    store.rows.delete(refs)
    for told, columns, meta in dump:
        ref = RowRef.FromString(told)
        row = {name: decode_column(name, data, ref.num_tokens) for name, data in columns.items()}
        store.rows.stage(ref, row, TrajectoryMeta.FromString(meta), 600)
    after = trained(store, [CommittedGroup.FromString(message) for message in messages], settings, models["dense"])
    assert after[0] == before[0], "the digest is of every bit that was read and computed"
    for again, first in zip(after[1], before[1], strict=True):
        assert {name: array.tobytes() for name, array in again.items()} == {
            name: array.tobytes() for name, array in first.items()
        }
    assert after[2:] == before[2:]
    assert before[2]["actor/policy_loss"] != 0
    assert before[3] > 0
