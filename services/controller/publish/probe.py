"""The probe of a publish: a few tokens of the run's own prompts, and the verdict on what actor and rollout compute.

Fingerprints and coverage say that the tensors arrived. The probe says that the engine computes with them: the actor's
logprobs against the rollout's, and the rollout's decode steps against its own prefill.

In float32 two right engines agree to 1e-5. In 16 bits they differ by rounding, which grows with the model's depth and
with the spread of its logits, so the bound is derived: the actor computes the probe once more with other kernels of its
own, and a rollout may be NOISE_FACTOR times as far away as the actor is from itself.
"""

import numpy as np

from rolecall.data.images.tokens import VisualTokens
from rolecall.settings import RunSettings
from rolecall.v1 import actor_pb2, rollout_pb2, weights_pb2
from rolecall.wire import Array, decode_tensor, encode_tensor
from services.controller.groups.prompts import PromptSequence

MAX_PROBE_TOKENS = 256
"""Enough for a quantile, few enough for one small prefill. Fewer where the run's longest trajectory is shorter."""
NUM_DECODED = 4
"""Tokens that a rollout samples after them: few, for each is a step of its engine."""
EXACT_BOUND = 1e-4
"""Most that a logprob may differ by in float32."""
NOISE_FACTOR = 4.0
"""How many times the actor's own noise two engines may differ by in 16 bits; vLLM on CPUs is 1.2 to 1.4 times as far.
"""
LEAST_BOUND, MOST_BOUND = 0.05, 1.0
"""Nats: below it small models differ that are right, above it no model is right whatever its own noise."""
QUANTILES = (0.5, 0.9)
"""Quantiles of the differences in 16 bits, each against that of the noise; single tokens may be further off."""


def make_probe(
    settings: RunSettings, prompts: PromptSequence, visual_tokens: VisualTokens | None = None
) -> weights_pb2.Probe:
    """The first prompts of `prompts`, end to end, as a request's probe, without the `visual_tokens` of their images,
    which it does not show. Moves its cursor. ConfigError when no prompt fits.
    """
    image = None if visual_tokens is None else visual_tokens.token_id
    longest = settings.data.max_prompt_tokens + settings.sampling.max_tokens
    num_decoded = min(NUM_DECODED, max(0, longest - 3))
    num_tokens = min(MAX_PROBE_TOKENS, longest - num_decoded - 1)
    ids: list[int] = []
    while len(ids) < num_tokens and (prompts.cursor.epoch == 0 or len(ids) < 2):
        ids += [token for token in np.frombuffer(prompts.next().token_ids, "<i4").tolist() if token != image]
    return weights_pb2.Probe(token_ids=encode_tensor(np.array(ids[:num_tokens], np.int32)), num_decoded=num_decoded)


def difference(
    sent: actor_pb2.PublishWeightsResponse,
    received: rollout_pb2.ReceiveWeightsResponse,
    *,
    exact: bool,
    tolerance: float | None,
) -> str | None:
    """Says what is wrong with a receiver's report; None when nothing is.

    `exact`: float32 weights; else those of 16 bits. `tolerance` replaces the bound: on every token in float32, on the
    quantiles in 16 bits.
    """
    theirs = {item.name: item.value for item in received.fingerprints}
    ours = {item.name: item.value for item in sent.fingerprints}
    wrong = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if wrong:
        return f"{len(wrong)} of {len(ours)} tensors differ, the first is {wrong[0]}"
    if sent.digest != received.digest:
        digests = f"digest {received.digest[:12]} is not {sent.digest[:12]}"
        return f"{digests} although all fingerprints agree: names, dtypes or shapes differ"
    return _of_probes(sent.probe, received.probe, exact, tolerance)


def _of_probes(
    sent: weights_pb2.Probe, received: weights_pb2.Probe, exact: bool, tolerance: float | None
) -> str | None:
    ours = decode_tensor(sent.logprobs, "the actor's probe")
    gap = np.abs(ours - decode_tensor(received.logprobs, "the rollout's probe"))[1:]
    decoded = decode_tensor(received.decoded_logprobs, "the rollout's decoded probe")
    decode_gap = np.abs(decoded - decode_tensor(received.prefilled_logprobs, "the rollout's prefilled probe"))
    if decoded.shape != (received.num_decoded,):
        return f"the probe's {received.num_decoded} tokens were not decoded"
    if exact:
        bounds = {1.0: tolerance or EXACT_BOUND}
    else:
        noise = np.abs(ours - decode_tensor(sent.again, "the actor's second probe"))[1:]
        bounds = {share: tolerance or _bound(noise, share) for share in QUANTILES}
    for share, bound in bounds.items():
        measured = float(np.quantile(gap, share))
        if not measured <= bound:
            which = "at most" if share == 1 else f"at {share:.0%} of the tokens"
            return (
                f"probe logprobs differ by {measured:.2e} {which}, more than {bound:.2e}: the tensors arrived "
                "but the engine computes with others"
            )
    # The widest bound: the median of so few may well be what a tenth of all tokens are off, and sampled again they are
    # the same.
    measured, bound = float(np.median(decode_gap)) if decode_gap.size else 0.0, bounds[max(bounds)]
    if not measured <= bound:
        return (
            f"logprobs of decode steps differ by {measured:.2e} from those of a prefill, more than {bound:.2e}: the "
            "engine "
            "decodes with other weights than it received"
        )
    return None


def _bound(noise: Array, share: float) -> float:
    return min(MOST_BOUND, max(LEAST_BOUND, NOISE_FACTOR * float(np.quantile(noise, share))))
