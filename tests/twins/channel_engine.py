"""Rollout engines that take part in the real weight channel and compute by plain transformers, on any device.

They stand in for vLLM where that is too slow or absent.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM

from rolecall.data.model.mixture import Mixture, read_mixture
from rolecall.weights.channel import Channel, join
from rolecall.weights.deltas.base import Base
from rolecall.weights.rendezvous import Rendezvous
from rolecall.weights.transfer import Reception, agreed_manifest
from rolecall.weights.transferred import Transferred
from rolecall.wire import Array
from services.rollout.sampling import MeetingPlace, Probed, SampleRequest
from services.rollout.scripted import Running, probed
from tests.routed import own_routing, write_with_other_routers
from tests.twins.engine import DigestEngine


class ChannelEngine(DigestEngine):
    """An engine that receives a model's weights over the real channel and samples by their digest."""

    def __init__(
        self, model: Path, device: torch.device = torch.device("cpu"), dtype: torch.dtype = torch.float32
    ) -> None:
        self._device = device
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval().to(device)
        super().__init__(eos_token_id=self._model.config.eos_token_id)
        self._channel: Channel | None = None
        self._base = Base()

    async def join(self, place: MeetingPlace) -> None:
        """Meets the actor in a new epoch."""
        await super().join(place)
        self._let_go()
        self._channel, self._base = await asyncio.to_thread(self._meet, place), Base()

    def _meet(self, place: MeetingPlace) -> Channel:
        rendezvous = Rendezvous(place.address, place.epoch, place.rank, place.timeout_s)
        try:
            return join(rendezvous, place.world_size, place.backend, self._device, place.timeout_s)
        except BaseException:
            rendezvous.close()
            raise

    async def receive(self, epoch: int, policy_version: int, bucket_timeout_s: float) -> Transferred:
        """Loads the weights that arrive."""
        received = await asyncio.to_thread(self._load, bucket_timeout_s)
        self._version, self.digest = policy_version, received.digest
        return received

    def _load(self, timeout_s: float) -> Transferred:
        assert self._channel is not None
        manifest = agreed_manifest(self._channel.rendezvous, timeout_s)
        reception = Reception(self._channel, manifest, timeout_s, self._base)
        for named in reception:
            self._model.load_state_dict(dict(named), strict=False)
        return reception.result()

    async def probe(self, token_ids: Sequence[int], num_decoded: int) -> Probed:
        """Computes by plain transformers."""
        with torch.no_grad():
            logits = self._model(torch.tensor([list(token_ids)], device=self._device)).logits[0].float().cpu()
        logprobs = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(list(token_ids[1:]))[:, None])[:, 0]
        return probed(np.concatenate([np.zeros(1, np.float32), logprobs.numpy()]), num_decoded)

    async def close(self) -> None:
        """Leaves the channel."""
        self._let_go()

    def _let_go(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel.rendezvous.close()
            self._channel = None


class PolicyEngine(ChannelEngine):
    """An engine that samples by plain transformers from the weights it received."""

    def __init__(
        self, model: Path, device: torch.device = torch.device("cpu"), dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(model, device, dtype)
        self._known: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        """(digest of the weights, prefix) -> logits [V], on the host: responses to one prompt begin alike."""

    @torch.no_grad()
    def _logits(self, token_ids: tuple[int, ...]) -> torch.Tensor:
        key = self.digest, token_ids
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


class MixtureEngine(PolicyEngine):
    """A mixture of experts that samples with routers a little off those that it received, and says where they sent its
    tokens.
    """

    def __init__(self, model: Path, folder: Path, scale: float) -> None:
        """`folder` is for the weights that arrive; `scale` as of write_with_other_routers."""
        super().__init__(model)
        self._mixture = read_mixture(model)
        self._folder, self._scale = folder, scale
        self._model.config.save_pretrained(folder)

    def _load(self, timeout_s: float) -> Transferred:
        assert self._channel is not None
        reception = Reception(self._channel, agreed_manifest(self._channel.rendezvous, timeout_s), timeout_s)
        arrived = {name: tensor.clone() for named in reception for name, tensor in named}
        save_file(arrived, self._folder / "model.safetensors", {"format": "pt"})
        self._model = Qwen3MoeForCausalLM.from_pretrained(self._folder, dtype=torch.float32).eval()
        off = write_with_other_routers(self._folder / "off", self._folder, self._scale)
        self._sampler = Qwen3MoeForCausalLM.from_pretrained(off, dtype=torch.float32).eval()
        return reception.result()

    @torch.no_grad()
    def _logits(self, token_ids: tuple[int, ...]) -> torch.Tensor:
        logits: torch.Tensor = self._sampler(torch.tensor([token_ids])).logits[0, -1]
        return logits

    def _routing(self, request: SampleRequest, running: Running, mixture: Mixture) -> Array:
        return own_routing(self._sampler, np.array([*request.prompt_token_ids, *running.tokens]))
