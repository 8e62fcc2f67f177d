"""A rollout engine that computes by the digest of the weights it holds.

Because the digest and not the version number counts, weights published again under a new version after a restore sample
the same tokens, and torn or false weights show in theirs.
"""

from collections.abc import Sequence

from services.rollout.sampling import Probed, SampleRequest
from services.rollout.scripted import ScriptedEngine, probed
from tests.twins.weights import END_TOKEN_ID, VOCABULARY, numbers_of, token_of


class DigestEngine(ScriptedEngine):
    """The scripted engine's scheduling; tokens hashed from (prompt, seed, weights digest)."""

    def __init__(
        self,
        max_model_tokens: int = 64,
        token_s: float = 0.0,
        eos_token_id: int = END_TOKEN_ID,
        sleep_levels: tuple[int, ...] = (),
    ) -> None:
        super().__init__(
            vocab_size=VOCABULARY,
            eos_token_id=eos_token_id,
            max_model_tokens=max_model_tokens,
            token_s=token_s,
            sleep_levels=sleep_levels,
        )
        self.digest = ""

    def _next(self, request: SampleRequest, position: int) -> tuple[int, float]:
        return token_of(request.prompt_token_ids, request.seed, self.digest, position)

    async def probe(self, token_ids: Sequence[int], num_decoded: int) -> Probed:
        return probed(numbers_of(self.digest, token_ids), num_decoded)
