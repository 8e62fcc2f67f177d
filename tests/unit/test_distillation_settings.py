"""Distillation before a run: what the configuration refuses, whose prompts have no teacher, what the store must hold,
what a batch is sealed with.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rolecall.columns import TOPK_IDS, TOPK_LOGPROBS
from rolecall.data.dataset import load_prompts
from rolecall.errors import ConfigError, InvalidInputError
from rolecall.settings import DataSection, DistillationSection, RewardSection, RunSettings
from rolecall.store.budget import PromptBytes, StoreBudget
from rolecall.trajectory import decode_column, encode_column
from rolecall.v1 import trajectory_pb2
from rolecall.wire import Array
from services.controller.groups.assembly import ScoredGroup
from services.controller.step.preparation import columns_read, prepare
from tests.conftest import MakeSettings

ELSEWHERE = RewardSection(address="scorer:1")
ROUTED = {"field": "subject", "teachers": {"math": "reckoner", "code": "coder"}}
RANKED = {"placement": "loss", "top_k": 4}


def distilling(
    make_settings: MakeSettings, distillation: dict[str, Any], *references: str, **sections: Any
) -> RunSettings:
    algorithm = {"groups_per_batch": 2, "distillation": distillation, **sections.pop("algorithm", {})}
    return make_settings(algorithm=algorithm, references={name: {} for name in references}, **sections)


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ({}, "no teacher: name an instance under references"),
        ({"field": "subject", "teacher": "wise"}, "teachers and field go together"),
        ({"teachers": {"math": "wise"}}, "teachers and field go together"),
        ({"teacher": "wise", "top_k": 4}, "placement: loss"),
        (
            {"teacher": "wise", **RANKED, "max_log_ratio": 5.0},
            "max_log_ratio: it bounds sampled tokens, and with top_k",
        ),
        ({"teacher": "wise", "max_log_ratio": 0.0}, "max_log_ratio"),
    ],
)
def test_a_section_that_cannot_teach_is_refused(section: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        DistillationSection.model_validate(section)


def test_a_teacher_must_be_a_reference_and_is_one_that_is_read(make_settings: MakeSettings) -> None:
    assert distilling(make_settings, ROUTED, "reckoner", "coder").algorithm.distillation is not None
    with pytest.raises(ValidationError, match=r"teachers \['coder'\], which are not under references"):
        distilling(make_settings, ROUTED, "reckoner")
    with pytest.raises(ValidationError, match=r"references \['idle'\] are read by nothing"):
        distilling(make_settings, ROUTED, "reckoner", "coder", "idle")


def test_the_common_name_of_teachers_is_not_that_of_the_kls_reference(make_settings: MakeSettings) -> None:
    kl = {"kl": {"reference": "teacher", "kl_coef": 0.1}}
    assert distilling(make_settings, {"teacher": "teacher"}, "teacher").references
    with pytest.raises(ValidationError, match="what teachers say is kept under this name"):
        distilling(make_settings, {"teacher": "teacher"}, "teacher", algorithm=kl)


def test_one_response_is_enough_where_no_reward_is_trained_on(make_settings: MakeSettings) -> None:
    assert (
        distilling(make_settings, {"teacher": "wise"}, "wise", sampling={"num_responses": 1}).sampling.num_responses
        == 1
    )
    with pytest.raises(ValidationError, match="num_responses must be at least 2"):
        distilling(make_settings, {"teacher": "wise", "task_coef": 0.5}, "wise", sampling={"num_responses": 1})


def test_groups_are_not_dropped_for_a_reward_that_is_not_trained_on(make_settings: MakeSettings) -> None:
    filters = {"filters": {"without_signal": True}}
    assert distilling(make_settings, {"teacher": "wise", "task_coef": 1.0}, "wise", algorithm=filters)
    with pytest.raises(ValidationError, match="without_signal drops groups by a reward"):
        distilling(make_settings, {"teacher": "wise"}, "wise", algorithm=filters)


@pytest.mark.parametrize(
    ("row", "how"),
    [({}, "missing"), ({"subject": "art"}, "'art', which is none of"), ({"subject": 3}, "3, which is none of")],
)
def test_a_prompt_without_a_teacher_is_named_by_line_and_field(tmp_path: Path, row: dict[str, Any], how: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        json.dumps({"prompt": "1 + 1", "subject": "math"}) + "\n" + json.dumps({"prompt": "a poem", **row}) + "\n"
    )
    data = DataSection.model_validate({"train": path})
    routed = DistillationSection.model_validate(ROUTED)
    with pytest.raises(ConfigError) as caught:
        load_prompts(path, data, ELSEWHERE, routed)
    assert str(caught.value).startswith(f"{path}, line 2, field 'subject': {how}")
    assert len(load_prompts(path, data, ELSEWHERE)) == 2
    assert (
        len(load_prompts(path, data, ELSEWHERE, DistillationSection.model_validate({**ROUTED, "teacher": "wise"}))) == 2
    )


def test_the_teacher_of_a_text_is_its_own_or_the_one_for_all_others() -> None:
    routed = DistillationSection.model_validate({**ROUTED, "teacher": "wise"})
    assert [routed.teacher_of(value) for value in ("math", "code", "art", None)] == [
        "reckoner",
        "coder",
        "wise",
        "wise",
    ]
    assert routed.instances == {"reckoner", "coder", "wise"}


def test_the_store_holds_one_teachers_columns_however_many_there_are(make_settings: MakeSettings) -> None:
    one, two = (
        distilling(make_settings, {"teacher": "wise"}, "wise"),
        distilling(make_settings, ROUTED, "reckoner", "coder"),
    )
    ranked, none = distilling(make_settings, {"teacher": "wise", **RANKED}, "wise"), make_settings()
    per_row = [
        StoreBudget.of(settings, PromptBytes(0)).group_bytes // settings.sampling.num_responses
        for settings in (none, one, two, ranked)
    ]
    num_tokens = none.data.max_prompt_tokens + none.sampling.max_tokens
    assert [after - per_row[0] for after in per_row[1:]] == [4 * num_tokens, 4 * num_tokens, (4 + 8 * 4) * num_tokens]


def test_columns_of_several_numbers_a_token_keep_their_shape() -> None:
    ids = np.arange(6, dtype=np.int32).reshape(3, 2)
    assert decode_column(TOPK_IDS, encode_column(TOPK_IDS, ids, 3), 3).tolist() == ids.tolist()
    with pytest.raises(InvalidInputError, match=r"it needs \[3, k\]"):
        encode_column(TOPK_LOGPROBS, np.zeros(3, np.float32), 3)
    with pytest.raises(InvalidInputError, match=r"it needs \[4, k\]"):
        encode_column(TOPK_IDS, ids, 4)


def scored(*rewards: float) -> ScoredGroup:
    refs = tuple(trajectory_pb2.RowRef(id=f"7/{i}", token="w.1-1", num_tokens=4) for i in range(len(rewards)))
    return ScoredGroup(
        7,
        refs,
        0,
        np.array(rewards, np.float32),
        np.array(rewards, np.float32),
        {},
        np.full(len(rewards), 2, np.int32),
        np.zeros(len(rewards), bool),
        0.1,
        0.0,
        0.0,
    )


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"coef": 2.0}, [-1.0, 0.5]),
        ({"coef": 2.0, "task_coef": 1.0}, [-1 + 0.7071, 0.5 + 0.7071]),
        ({"task_coef": 1.0, **RANKED}, [0.7071, 0.7071]),
    ],
    ids=["alone", "with the task", "a loss leaves the task's"],
)
def test_a_batch_is_sealed_with_what_the_teacher_says(
    make_settings: MakeSettings, section: dict[str, Any], expected: list[float]
) -> None:
    settings = distilling(make_settings, {"teacher": "wise", **section}, "wise")
    assert "teacher/logprobs" in columns_read(settings)
    rows: list[dict[str, Array]] = [
        {
            "token_ids": np.array([1, 2, 3, 4], np.int32),
            "response_mask": np.array([0, 0, 1, 1], np.uint8),
            "rollout_logprobs": np.array([0, 0, -0.6, -0.2], np.float32),
            "old_logprobs": np.array([0, 0, -0.5, -0.25], np.float32),
            "teacher/logprobs": np.array([0, 0, -1.0, 0.0], np.float32),
            "reward": np.array([reward], np.float32),
        }
        for reward in (1, 0)
    ]
    _, columns = prepare(settings, 0, [scored(1.0, 0.0)], rows)
    np.testing.assert_allclose(columns[0]["advantages"], [0, 0, *expected], atol=1e-4)
    assert columns[0]["advantages"].dtype == np.float32
