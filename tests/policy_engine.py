"""A rollout's engine that samples by plain transformers from the weights that it receives, on any device.

What stands in for vLLM where that is too slow or absent.
"""

from pathlib import Path

import numpy as np
import torch

from services.rollout.sampling import SampleRequest
from tests.replay_rig import DigestEngine


class PolicyEngine(DigestEngine):
    """Samples from the weights it received."""

    def __init__(
        self, model: Path, device: torch.device = torch.device("cpu"), dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(model, device, dtype)
        self._known: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        """(digest of the weights, prefix) -> logits [V], on the host: responses to one prompt begin alike."""

    @torch.no_grad()
    def _logits(self, token_ids: tuple[int, ...]) -> torch.Tensor:
        key = self._digest, token_ids
        if key not in self._known:
            self._known[key] = self._model(torch.tensor([token_ids], device=self._device)).logits[0, -1].float().cpu()
        return self._known[key]

    def _next(self, request: SampleRequest, position: int) -> tuple[int, float]:
        logits = self._logits((*request.prompt_token_ids, *self._running[request.request_id].tokens))
        if request.sampling.temperature == 0:
            return int(logits.argmax()), 0.0
        logprobs = torch.log_softmax(logits / request.sampling.temperature, -1).double().numpy()
        token = np.random.default_rng([request.seed, position]).choice(
            logprobs.size, p=np.exp(logprobs) / np.exp(logprobs).sum()
        )
        return int(token), float(logprobs[token])
