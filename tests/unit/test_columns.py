"""The table of columns, and what follows from it."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from pydantic import ValidationError

from rolecall.columns import COLUMNS, Plugin, Writer, columns_for, columns_of
from rolecall.errors import ConfigError
from rolecall.settings import CustomAdvantage
from rolecall.store.budget import PromptBytes
from rolecall.store.position import RunPosition
from rolecall.v1 import trajectory_pb2
from services.controller.durable.recovery import Recovery
from services.controller.step.trainers import ActorTrainer, CriticTrainer
from tests.unit.test_controller_batches import run_settings

NOTHING = cast(Any, None)
EXACT = {"components": {"right": {"scorer": {"kind": "exact_match"}}}}
PLAIN = {
    *("token_ids", "response_mask", "rollout_logprobs", "policy_versions"),
    *("reward", "reward_components", "reward_component_names", "old_logprobs", "loss_mask", "advantages"),
}


def names(algorithm: dict[str, Any] | None = None, **sections: Any) -> set[str]:
    sections = {"reward": EXACT, **sections}
    settings = run_settings(algorithm={"groups_per_batch": 2, **(algorithm or {})}, **sections)
    return {column.name for column in settings.columns}


def test_a_row_has_the_columns_that_the_run_asks_for() -> None:
    scorer = {"kind": "function", "target": "mine:score", "token_rewards": True}
    assert names() == PLAIN
    assert names(reward={"address": "elsewhere:1"}) == PLAIN | {"token_rewards"}, "whoever is there may give them"
    assert names(reward={"components": {"steps": {"scorer": scorer}}}) == PLAIN | {"token_rewards"}
    assert names({"advantage": {"kind": "optimal_token_baseline"}}) == PLAIN | {"sum_squared_probs"}
    assert names({"advantage": {"kind": "gae"}}, critic={}) == PLAIN | {"values", "bootstrap_value", "returns"}
    kl = {"kl": {"reference": "ref", "kl_coef": 0.1}}
    assert names(kl, references={"ref": {}}) == PLAIN | {"ref/logprobs"}
    base = {"kl": {"reference": "base", "kl_coef": 0.1}}
    assert names(base, actor={"lora": {}}) == PLAIN, "the actor computes its base's in its own memory"
    teacher = {"distillation": {"teacher": "wise"}}
    assert names(teacher, references={"wise": {}}) == PLAIN | {"teacher/logprobs"}
    assert names(actor={"router_replay": "r2"}) == PLAIN | {"old_routed_experts"}
    assert names(actor={"router_replay": "r3"}) == PLAIN | {"routed_experts"}


def test_what_a_step_reads_beyond_every_run_s_columns_names_its_setting() -> None:
    def asked(algorithm: dict[str, Any], **sections: Any) -> dict[str, str]:
        tree = {"reward": EXACT, "algorithm": {"groups_per_batch": 2, **algorithm}}
        return run_settings(**(tree | sections)).columns_trained_on

    kl = {"reference": "ref", "kl_coef": 0.1}
    ref: dict[str, Any] = {"references": {"ref": {}}}
    assert asked({"kl": {**kl, "placement": "reward"}}, **ref) == {}, "the controller reads it, before the seal"
    assert asked({"kl": {**kl, "placement": "loss"}}, **ref) == {"ref/logprobs": "algorithm.kl"}
    base = {"kl": {"reference": "base", "kl_coef": 0.1, "placement": "loss"}}
    assert asked(base, actor={"lora": {}}) == {}, "no row holds it"
    taught = {"teacher": "ref", "placement": "loss"}
    assert asked({"distillation": {"teacher": "ref"}}, **ref) == {}
    assert asked({"distillation": taught}, **ref) == {"teacher/logprobs": "algorithm.distillation"}
    topk = dict.fromkeys(("teacher/topk_ids", "teacher/topk_logprobs"), "algorithm.distillation")
    assert asked({"distillation": {**taught, "top_k": 4}}, **ref) == topk
    own = {"kind": "custom", "function": "mine:f", "columns": ["token_rewards"]}
    given = {"reward": {"address": "elsewhere:1"}}
    assert asked({"policy_loss": own}, **given) == {"token_rewards": "algorithm.policy_loss"}
    assert asked({}, actor={"router_replay": "r3"}) == {"routed_experts": "actor.router_replay"}
    assert asked({}, actor={"router_replay": "r2"}) == {}


@pytest.mark.parametrize("critic_only", [False, True])
def test_a_batch_that_lacks_what_the_actor_reads_is_refused_unless_the_critic_alone_learns_of_it(
    critic_only: bool,
) -> None:
    batch = trajectory_pb2.TrainBatch(critic_only=critic_only, columns=["token_ids"])
    settings = SimpleNamespace(columns_trained_on={"ref/logprobs": "algorithm.kl"})
    ledger = SimpleNamespace(sealed=lambda step: batch)
    recovery = Recovery(cast(Any, settings), cast(Any, ledger), NOTHING, NOTHING, (), NOTHING, PromptBytes(0), print)
    position = cast(RunPosition, SimpleNamespace(set_back=False, step=4))
    if critic_only:
        recovery.require_columns(position, 4)
    else:
        with pytest.raises(ConfigError, match="the batch of step 4 was sealed without"):
            recovery.require_columns(position, 4)


@pytest.mark.parametrize("top_k", [4, 8, None])
def test_groups_in_flight_that_were_ranked_for_another_top_k_are_refused(top_k: int | None) -> None:
    groups = [trajectory_pb2.CommittedGroup(gid=gid, rows=[trajectory_pb2.RowRef(id=f"{gid}/0")]) for gid in range(3)]
    read = {"0/0": {}, "1/0": {"teacher/topk_ids": np.zeros((5, 4), np.int32)}, "2/0": {}}
    ledger = SimpleNamespace(
        read_committed=lambda position, count, wait_s: [("1-1", group) for group in groups] if position == "0" else []
    )
    rows = SimpleNamespace(read=lambda refs, columns, optional: [read[refs[0].id]])
    distillation = SimpleNamespace(top_k=top_k)
    settings = SimpleNamespace(algorithm=SimpleNamespace(distillation=distillation))
    recovery = Recovery(
        cast(Any, settings), cast(Any, ledger), cast(Any, rows), NOTHING, (), NOTHING, PromptBytes(0), print
    )
    if top_k == 8:
        with pytest.raises(ConfigError, match=r"ranked for 4, and 8 make no batch with them; resume with 4"):
            recovery.require_one_width()
    else:
        recovery.require_one_width()


def test_trainers_are_asked_for_the_columns_that_they_write() -> None:
    actors = {"old_logprobs", "sum_squared_probs", "old_routed_experts"}
    assert ActorTrainer.columns == actors == set(columns_of(Writer.ACTOR))
    assert CriticTrainer.columns == {"values", "bootstrap_value"} == set(columns_of(Writer.CRITIC))


def test_a_users_estimator_names_columns_that_it_may_ask_for() -> None:
    for name in columns_for(Plugin.ESTIMATOR):
        assert CustomAdvantage.model_validate({"function": "mine:f", "columns": [name]}).needs == (name,)
    for name in ("advantages", "returns", "reward", "valeus"):
        with pytest.raises(ValidationError, match=f"'{name}' is no column that an estimator may ask for; name some of"):
            CustomAdvantage.model_validate({"function": "mine:f", "columns": [name]})


def test_bytes_of_a_token_are_those_of_the_dtype() -> None:
    for column in COLUMNS.values():
        per_token = np.dtype(column.dtype).itemsize * (7 if len(column.shape) == 2 else 1)
        assert column.bytes_per_token(7) == (per_token if column.per_token else 0)


def test_columns_keep_the_dtypes_and_lengths_of_the_rows_that_hold_them_already() -> None:
    dtypes = dict.fromkeys(("token_ids", "policy_versions", "teacher/topk_ids"), "<i4")
    dtypes |= dict.fromkeys(("response_mask", "loss_mask", "routed_experts", "old_routed_experts"), "u1")
    dtypes |= dict.fromkeys(("reward_component_names", "images"), "u1")
    assert {name: column.dtype for name, column in COLUMNS.items()} == dict.fromkeys(COLUMNS, "<f4") | dtypes
    of_a_row = {"reward", "reward_components", "reward_component_names", "bootstrap_value", "images"}
    assert {name for name, column in COLUMNS.items() if not column.per_token} == of_a_row


def test_users_functions_read_what_they_were_written_for() -> None:
    shared = {"token_ids", "rollout_logprobs", "policy_versions", "token_rewards", "values", "old_logprobs"}
    assert set(columns_for(Plugin.ESTIMATOR)) == shared | {"bootstrap_value", "sum_squared_probs"}
    assert set(columns_for(Plugin.LOSS)) == shared | {
        *("response_mask", "loss_mask", "advantages", "returns", "teacher/logprobs")
    }
