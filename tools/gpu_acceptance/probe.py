"""Check 15: how far apart correct engines are, and whether a publish would take them for right.

The same weights and ids by the trainer's engine, with both its kinds of attention, and by transformers with two of its
own; random weights, heads of three
spreads of logits.
"""

import copy
import gc
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from rolecall.training.engine import TokenOutputs
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.packing.pack import pack, unpack
from rolecall.training.ranks.device import free_cached_memory
from rolecall.v1 import actor_pb2, rollout_pb2, weights_pb2
from rolecall.wire import Array, encode_tensor
from services.controller.publish.probe import MAX_PROBE_TOKENS, difference
from services.rollout.sampling import Probed
from tools.gpu_acceptance.findings import Findings
from tools.gpu_acceptance.stage import STD, Stage, local_parameters, make_engine, write_zeros

_TEXT = Path(__file__).parents[2] / "ARCHITECTURE.md"
_NOTHING = np.zeros(0, np.float32)


@torch.no_grad()
def check_probe(found: Findings, folder: Path) -> None:
    """A table of the differences; the controller's verdict must let every pair pass."""
    stage = Stage.of(found, folder)
    config = stage.config("4B", tie_word_embeddings=False)
    engine = make_engine(stage, write_zeros(folder / "model", config), optimizer=None)
    head = next(parameter for name, parameter in local_parameters(engine).items() if name == "lm_head.weight")
    num_tokens = stage.pick(MAX_PROBE_TOKENS, 64)
    texts = {
        "uniform": np.random.default_rng(0).integers(0, config.vocab_size, num_tokens, dtype=np.int32),
        "text": _ids_of_text(config.vocab_size, num_tokens),
    }
    # Of the logits: the final norm makes every hidden state's root mean square 1.
    spread = STD * config.hidden_size**0.5
    scale = 1.0
    for wanted in (1.0, 2.0, 4.0):
        head.mul_(wanted / spread / scale)
        scale = wanted / spread
        others = _by_transformers(stage, engine, texts)
        for name, ids in texts.items():
            ours, again = (by_engine(engine, ids, stage, plain=plain) for plain in (False, True))
            pairs = {
                "engine-itself": (ours, again),
                "engine-sdpa": (ours, others["sdpa", name]),
                "engine-eager": (ours, others["eager", name]),
                "engine-float32": (ours, others["float32", name]),
                "sdpa-eager": (others["sdpa", name], others["eager", name]),
            }
            gaps = {pair: np.abs(one - other)[1:] for pair, (one, other) in pairs.items()}
            said = ", ".join(
                f"{pair} {gap.mean():.3f}/{np.median(gap):.3f}/{np.quantile(gap, 0.9):.3f}/{gap.max():.3f}"
                for pair, gap in gaps.items()
            )
            found.figure(f"logit std {wanted:g}, {name} (mean/median/90%/max)", said)
            found.require(
                f"{name} at {wanted:g}: not every number is finite",
                all(np.isfinite(gap).all() for gap in gaps.values()),
            )
            for way in ("sdpa", "eager"):
                wrong = verdict(ids, ours, again, Probed(others[way, name], _NOTHING, _NOTHING), exact=False)
                found.require(f"{name} at {wanted:g}, {way}: {wrong}", wrong is None)


def verdict(ids: Array, ours: Array, again: Array, theirs: Probed, *, exact: bool) -> str | None:
    """The controller's: a rollout says `theirs`, the actor `ours` and, with other kernels, `again`."""
    sent = weights_pb2.Probe(token_ids=encode_tensor(ids), logprobs=encode_tensor(ours), again=encode_tensor(again))
    received = weights_pb2.Probe(
        logprobs=encode_tensor(theirs.logprobs),
        num_decoded=len(theirs.decoded_logprobs),
        decoded_logprobs=encode_tensor(theirs.decoded_logprobs),
        prefilled_logprobs=encode_tensor(theirs.prefilled_logprobs),
    )
    answers = actor_pb2.PublishWeightsResponse(probe=sent), rollout_pb2.ReceiveWeightsResponse(probe=received)
    return difference(*answers, exact=exact, tolerance=None)


def _ids_of_text(vocab: int, num_tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Words of a text as ids by how often they come: the repetitions of a language without a tokenizer."""
    words = _TEXT.read_text().split()
    ranks = {word: rank for rank, word in enumerate(sorted(set(words), key=lambda word: (-words.count(word), word)))}
    return np.asarray([ranks[word] % vocab for word in words[100 : 100 + num_tokens]], np.int32)


def by_engine(engine: FsdpEngine, ids: Array, stage: Stage, *, plain: bool) -> Array:
    """float32 [T], 0 for the first token, as the actor's probe."""
    row = {"token_ids": ids, "response_mask": np.ones(ids.shape, np.uint8)}
    (outputs,) = engine.forward([pack([row], (), temperature=1.0, device=stage.device)], plain=plain)
    assert isinstance(outputs, TokenOutputs)
    (logprobs_T,) = unpack(outputs.logprobs_N, (len(ids),))
    return logprobs_T


def _by_transformers(stage: Stage, engine: FsdpEngine, texts: dict[str, Array]) -> dict[tuple[str, str], Array]:
    """Returns the logprobs of transformers by (attention or dtype, text)."""
    said: dict[tuple[str, str], Array] = {}
    config = copy.deepcopy(engine.config)  # the way to attend is set in it, and the engine reads its own at each pass
    for dtype in (torch.bfloat16, torch.float32):
        with torch.device(stage.device):
            model = Qwen3ForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
        model.load_state_dict(dict(engine.named_weights()))
        ways = ("sdpa", "eager") if dtype == torch.bfloat16 else ("sdpa",)
        for way in ways:
            model.set_attn_implementation(way)
            for name, ids in texts.items():
                ids_T = torch.from_numpy(ids.astype(np.int64)).to(stage.device)
                logits = model(input_ids=ids_T[None], use_cache=False).logits[0, :-1].double()
                logprobs = torch.log_softmax(logits, -1).gather(1, ids_T[1:, None])[:, 0].float().cpu().numpy()
                said["float32" if dtype == torch.float32 else way, name] = np.concatenate(
                    [np.zeros(1, np.float32), logprobs]
                )
        del model
        gc.collect()
        free_cached_memory(stage.device)
    return said
