"""A real vLLM that keeps keys and values over a publish: what it samples then, compared with Hugging Face on a cache
that the older weights filled.
"""

import contextlib
import copy
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from rolecall.trajectory import SAMPLED_COLUMNS
from rolecall.v1 import rollout_pb2, trajectory_pb2
from rolecall.wire import Array, decode_tensor
from tests.integration.rollout_process import PROBE, RolloutProcess, check_sampled_from, group, rollout_process
from tests.ports import free_port
from tests.tiny_models import write_qwen3
from tests.tiny_tokenizer import EOS_TOKEN_ID

pytestmark = pytest.mark.timeout(300)

PROMPT = [1, 60, 61, 62, 63, 2, 1, 70]
BLOCK = 128
"""Tokens of a block of the engine's cache on CPUs; responses share whole ones of their prompts."""
BLOCK_BYTES = 2**17
"""Bytes of one, of the model below."""
NUM_GROUPS, NUM_RESPONSES, NUM_PLACES = 4, 4, 5
TEMPERATURE = 0.25
"""So low that the end token, whose logit is 0, is never sampled: every response has all of its tokens, and none ends
while the probe runs.
"""


@torch.no_grad()
def logprobs_from(older: PreTrainedModel, newer: PreTrainedModel, token_ids: list[int], first_new: int) -> Array:
    """float32 [T - first_new]: logprobs of the tokens from `first_new` on under `newer`, which goes on from what
    `older` computed of all tokens but the one before them.
    """
    ids = torch.tensor([token_ids])
    filled = older(ids[:, : first_new - 1], use_cache=True).past_key_values
    logits = newer(ids[:, first_new - 1 :], past_key_values=filled).logits[0].float() / TEMPERATURE
    chosen = torch.log_softmax(logits, dim=-1)[:-1].gather(1, ids[0, first_new:, None])[:, 0]
    return chosen.numpy()


def groups_of(rollout: RolloutProcess) -> dict[int, trajectory_pb2.CommittedGroup]:
    """All NUM_GROUPS groups, once they are committed."""
    found: dict[int, trajectory_pb2.CommittedGroup] = {}
    deadline = time.monotonic() + 120
    while len(found) < NUM_GROUPS and time.monotonic() < deadline:
        found = {one.gid: one for _, one in rollout.ledger.read_committed("0", 100, 0.5)}
    assert sorted(found) == list(range(NUM_GROUPS))
    return found


def num_ended_tokens(rollout: RolloutProcess) -> int:
    """Tokens of the responses that have ended."""
    return int(rollout.stub.GetInfo(rollout_pb2.GetRolloutInfoRequest(), timeout=60).num_sampled_tokens)


@contextlib.contextmanager
def sampling(
    folder: Path, prompt: list[int], num_tokens: int, num_blocks: int, **telemetry: Any
) -> Iterator[RolloutProcess]:
    """A replica that keeps its cache of `num_blocks`, at version 1, with NUM_GROUPS groups, whose prompts begin with
    `prompt`, of responses of `num_tokens`: more than it has places for.
    """
    places = {"pause_mode": "keep_cache", "max_num_seqs": NUM_PLACES, "max_groups": NUM_GROUPS}
    model_path = write_qwen3(folder / "model", hidden=128)
    weights = load_file(model_path / "model.safetensors")
    weights["lm_head.weight"][EOS_TOKEN_ID] = 0
    save_file(weights, model_path / "model.safetensors", {"format": "pt"})
    cache = {"kv_cache_bytes": num_blocks * BLOCK_BYTES}
    with rollout_process(folder, model_path, rollout={**places, **cache}, telemetry=telemetry) as rollout:
        rollout.open_epoch()
        rollout.publish()
        for gid in range(NUM_GROUPS):
            one = group(gid, [*prompt, gid], NUM_RESPONSES, max_tokens=num_tokens, temperature=TEMPERATURE)
            rollout.ledger.admit(one, b"")
        rollout.wait_for_groups()
        yield rollout


def test_a_full_engine_proves_its_new_weights_and_goes_on_from_the_keys_and_values_of_the_old(tmp_path: Path) -> None:
    prompt = (PROMPT * BLOCK)[: BLOCK + 2]
    with sampling(tmp_path, prompt, 360, num_blocks=512) as rollout:
        older = copy.deepcopy(rollout.model)
        rollout.perturb(1)
        rollout.stub.Pause(rollout_pb2.PauseRequest(ctl=1, mode=rollout_pb2.PAUSE_MODE_KEEP_CACHE), timeout=60)
        ended = num_ended_tokens(rollout)
        rollout.ledger.begin_publish(2, 2)
        _, received = rollout.transfer(pause_mode=rollout_pb2.PAUSE_MODE_KEEP_CACHE)
        assert num_ended_tokens(rollout) == ended, "the probe waited until a kept response had ended"
        rollout.attest()
        assert np.abs(decode_tensor(received.probe.logprobs, "probe") - rollout.logprobs(PROBE)).max() < 1e-4
        moved, mixed, num_anew = [], 0, 0
        for one in groups_of(rollout).values():
            for row in rollout.rows.read(list(one.rows), SAMPLED_COLUMNS):
                ids, new = row["token_ids"].tolist(), row["policy_versions"] == 2
                sampled, anew = row["rollout_logprobs"], rollout.logprobs(ids, TEMPERATURE)
                first_new = int(new.argmax())
                if new.any() and first_new > len(prompt) + 1:
                    mixed += 1
                    check_sampled_from(sampled[new], logprobs_from(older, rollout.model, ids, first_new))
                    moved += np.abs(sampled[new] - anew[new]).tolist()
                elif new.any():
                    num_anew += bool(np.median(np.abs(sampled[new] - anew[new])) < 1e-4)
        assert mixed > 0
        # Places came free for them after the publish; the older weights had computed the block they begin with.
        assert num_anew >= NUM_GROUPS * NUM_RESPONSES - 2 * NUM_PLACES
        assert np.median(moved) > 1e-3, "the oracle could not tell a cache that was computed anew"
        use = use_of(rollout)
        assert 0 < use.num_cached_tokens < use.num_prompt_tokens, "they share a block of their prompts"
        assert use.num_cached_tokens % BLOCK == 0
        assert 0 < use.kv_cache_usage < 0.1
        assert use.num_preemptions == 0, "nothing gave way to a publish"


def test_the_probe_comes_through_where_kept_keys_and_values_fill_the_cache(tmp_path: Path) -> None:
    # Six blocks beside vLLM's own one: three responses of two or two of three fill them, and a longest takes four.
    page = f"127.0.0.1:{free_port()}"
    with sampling(tmp_path, PROMPT, 480, num_blocks=7, metrics_bind=page) as rollout:
        for seed in range(3):
            rollout.perturb(seed)
            rollout.publish(pause_mode=rollout_pb2.PAUSE_MODE_KEEP_CACHE)
        assert {one.max_policy_version for one in groups_of(rollout).values()} == {4}
        use = use_of(rollout)
        assert use.num_preemptions > 0
        assert use.kv_cache_usage > 0.5
        shown = shown_at(page, "rollout/running_requests", 0.0)
        assert (shown["rollout/preemptions"], shown["rollout/waiting_requests"]) == (use.num_preemptions, 0)
        assert shown["rollout/kv_cache_usage"] == use.kv_cache_usage
        assert shown.get("rollout/prefix_cache_hit_rate", 0) == 0, "their prompts are shorter than a block"


def use_of(rollout: RolloutProcess) -> rollout_pb2.EngineUse:
    """What requests took of the engine."""
    answer: rollout_pb2.GetRolloutInfoResponse = rollout.stub.GetInfo(rollout_pb2.GetRolloutInfoRequest(), timeout=60)
    assert answer.HasField("engine_use")
    return answer.engine_use


def shown_at(page: str, name: str, value: float) -> dict[str, float]:
    """What the replica shows to Prometheus, by name, once `name` has come to `value`."""
    shown: dict[str, float] = {}
    deadline = time.monotonic() + 60
    while shown.get(name) != value and time.monotonic() < deadline:
        time.sleep(0.2)
        with urllib.request.urlopen(f"http://{page}/metrics", timeout=20) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            found = [sample for family in families for sample in family.samples if sample.name == "rolecall_metric"]
        assert {sample.labels["worker"] for sample in found} <= {"rollout-0"}
        shown = {sample.labels["name"]: sample.value for sample in found}
    assert shown.get(name) == value, shown
    return shown
