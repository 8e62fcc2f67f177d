"""What ActorService promises of an actor with adapters: what it publishes, and a KL to its own base that is that to a
reference service.
"""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3ForCausalLM

from rolecall.checkpoint.manifest import RunCheckpoints, StoredFile
from rolecall.checkpoint.storage import open_storage
from rolecall.errors import ConfigError
from rolecall.settings import LoraSection, RunSettings
from rolecall.training.model import lora
from rolecall.v1 import weights_pb2
from rolecall.v1.training_pb2 import LoadTrainerCheckpointRequest, SaveTrainerCheckpointRequest, TrainRequest
from rolecall.v1.trajectory_pb2 import Coefficients, TrainBatch
from rolecall.weights.channel import join
from rolecall.weights.rendezvous import Rendezvous
from rolecall.weights.transfer import Reception, agreed_manifest
from rolecall.wire import decode_tensor
from tests.fixtures_store import StoreUnderTest
from tests.tiny_models import write_qwen3
from tests.twins.served import (
    PROBE,
    Batches,
    MakeRun,
    publish_request,
    saved,
    served_actor,
    settings_tree,
    train,
    true_logprobs,
    values_of,
)

ACTOR = {"token_budget": 64, "num_threads": 1, "optimizer": {"learning_rate": 1e-2}, "lora": {"rank": 4, "alpha": 8}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("model") / "policy", tied=True)


@pytest.fixture
def make_run(store: StoreUnderTest, model: Path, tmp_path: Path) -> MakeRun:
    def make(**sections: Any) -> RunSettings:
        return RunSettings.model_validate(settings_tree(store, model, tmp_path, actor=ACTOR, **sections))

    return make


def kl_to(reference: str) -> dict[str, Any]:
    """Four mini-batches of two rows, so that the policy moves within a step."""
    return {"groups_per_batch": 4, "num_minibatches": 4, "kl": {"reference": reference, "kl_coef": 0.5}}


def receive_adapter(address: str) -> tuple[weights_pb2.WeightManifest, dict[str, torch.Tensor]]:
    """What the first epoch's transfer says and brings."""
    rendezvous = Rendezvous(address, 1, 1, 10.0)
    channel, manifest = join(rendezvous, 2, "shared", torch.device("cpu"), 10.0), agreed_manifest(rendezvous, 10.0)
    return manifest, {name: tensor for bucket in Reception(channel, manifest, 10.0) for name, tensor in bucket}


async def test_a_kl_to_the_base_is_the_kl_to_a_reference_service_of_the_same_model(
    store: StoreUnderTest, make_run: MakeRun, model: Path
) -> None:
    ctl, batches = store.ledger.ctl, Batches(store, model, coefficients=Coefficients(kl_coef=0.5))
    sealed: list[TrainBatch] = []
    values: dict[str, list[dict[str, float]]] = {}
    async with served_actor(make_run(algorithm=kl_to("base")), store) as (_, actor):
        values["base"] = []
        for step in range(2):
            sealed.append(batches.sealed(step))
            result = await train(actor, TrainRequest(ctl=ctl, step=step, digest=sealed[step].digest))
            batches.commit(result)
            values["base"].append(values_of(result))
    for batch in sealed:
        rows = store.rows.read(batch.rows, ["token_ids", "response_mask"])
        store.rows.put(
            batch.rows,
            [{"ref/logprobs": true_logprobs(model, row["token_ids"], 0.8) * row["response_mask"]} for row in rows],
        )
    async with served_actor(make_run(algorithm=kl_to("ref"), references={"ref": {}}), store) as (_, actor):
        values["ref"] = [
            values_of(await train(actor, TrainRequest(ctl=ctl, step=step, digest=sealed[step].digest)))
            for step in range(2)
        ]
    assert values["base"][1]["actor/reference_kl"] > 1e-3
    for ours, theirs in zip(values["base"], values["ref"], strict=True):
        for name in ("actor/reference_kl", "actor/loss", "actor/grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name


async def test_what_is_published_is_an_adapter_that_makes_the_base_the_actors_model(
    store: StoreUnderTest, make_run: MakeRun, model: Path
) -> None:
    ctl, batches, settings = store.ledger.ctl, Batches(store, model), make_run()
    async with served_actor(settings, store) as (_, actor):
        await train(actor, TrainRequest(ctl=ctl, step=0, digest=batches.sealed(0).digest))
        opened = await actor.OpenWeightChannel(
            weights_pb2.OpenWeightChannelRequest(ctl=ctl, epoch=1, world_size=2, timeout_s=10), timeout=10
        )
        published, (manifest, tensors) = await asyncio.gather(
            actor.PublishWeights(publish_request(ctl, step=1, version=5), timeout=30),
            asyncio.to_thread(receive_adapter, opened.address),
        )
    assert (manifest.adapter.rank, manifest.adapter.alpha) == (4, 8.0)
    assert [item.name for item in published.fingerprints] == list(tensors)
    section = settings.actor.lora
    assert section is not None
    hf = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    before = true_logprobs(model, PROBE, 1.0)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            down, up = (lora.peft_name(each) for each in lora.adapter_names(name))
            if down in tensors:
                parameter.copy_(lora.merged(parameter, tensors.pop(down), tensors.pop(up), section))
        assert not tensors
        log_p = hf(torch.from_numpy(PROBE.astype(np.int64))[None]).logits[0, :-1].log_softmax(-1)
    expected = log_p.gather(1, torch.from_numpy(PROBE[1:].astype(np.int64))[:, None])[:, 0].numpy()
    probe = decode_tensor(published.probe.logprobs, "probe")
    np.testing.assert_allclose(probe[1:], expected, atol=1e-4)
    assert np.abs(probe - before).max() > 1e-2


async def test_an_actor_that_has_a_checkpoint_begins_again_without_the_folder_of_its_first_adapter(
    store: StoreUnderTest, model: Path, tmp_path: Path
) -> None:
    ctl, batches, start = store.ledger.ctl, Batches(store, model), tmp_path / "start"
    section = LoraSection(rank=4, alpha=8, start=start)
    theirs = LoraConfig(r=4, lora_alpha=8, target_modules=list(section.target_modules), task_type="CAUSAL_LM")
    get_peft_model(Qwen3ForCausalLM.from_pretrained(model), theirs).save_pretrained(start)
    actor_section = ACTOR | {"lora": section.model_dump(mode="json")}
    settings = RunSettings.model_validate(settings_tree(store, model, tmp_path, actor=actor_section))
    checkpoints = RunCheckpoints(open_storage(settings.run.checkpoints), 1)
    attempt = checkpoints.begin(1)
    path = attempt.storage.at("actor").url
    async with served_actor(settings, store) as (_, actor):
        batches.commit(await train(actor, TrainRequest(ctl=ctl, step=0, digest=batches.sealed(0).digest)))
        files = await saved(actor, SaveTrainerCheckpointRequest(ctl=ctl, path=path, step=1))
        one = TrainRequest(ctl=ctl, step=1, digest=batches.sealed(1).digest)
        expected = values_of(await train(actor, one))
    shutil.rmtree(start)
    with pytest.raises(ConfigError, match=r"actor\.lora\.start .* is no adapter"):
        async with served_actor(settings, store):
            pass
    kept = [StoredFile(f"actor/{file.name}", file.num_bytes, file.checksum) for file in files]
    checkpoints.commit(attempt, kept, {"run": store.run})
    async with served_actor(settings, store) as (_, actor):
        await actor.LoadCheckpoint(LoadTrainerCheckpointRequest(ctl=ctl, path=path, files=files), timeout=30)
        again = values_of(await train(actor, one))
    for name in ("actor/loss", "actor/grad_norm"):
        assert again[name] == pytest.approx(expected[name], rel=1e-5)
