"""A reference on its ranks: logprobs of sampled tokens under frozen weights, and what a teacher says besides. Knows
tensors and no gRPC.
"""

from collections.abc import Sequence

from rolecall.columns import TEACHER, TOPK_IDS, TOPK_LOGPROBS, reference_column
from rolecall.data.model_files import vocab_size
from rolecall.errors import ConfigError
from rolecall.settings import RunSettings
from rolecall.store.connection import Connection
from rolecall.training.engine import Microbatch, TokenOutputs, ValueOutputs
from rolecall.training.model.logits.logprobs import Wanted
from rolecall.training.packing.pack import unpack
from rolecall.training.serving.hooks import UNWATCHED, ProcessHooks
from rolecall.training.step.role_ranks import ColumnRanks
from rolecall.training.step.start import start_store_context
from rolecall.wire import Array
from services.reference import config


class ReferenceLogprobs:
    """The logprobs column of the reference `instance`."""

    wanted: Wanted | None = None
    reads: Sequence[str] = ()

    def __init__(self, instance: str) -> None:
        self._column = reference_column(instance)
        self.names: tuple[str, ...] = (self._column,)

    def encode(self, microbatch: Microbatch, outputs: TokenOutputs | ValueOutputs) -> list[dict[str, Array]]:
        """RoleColumns.encode."""
        assert isinstance(outputs, TokenOutputs)
        return [{self._column: logprobs_T} for logprobs_T in unpack(outputs.logprobs_N, microbatch.lengths)]


class TeacherRanking:
    """The columns of a teacher whose highest probabilities are wanted, too."""

    names: tuple[str, ...] = (reference_column(TEACHER), TOPK_IDS, TOPK_LOGPROBS)
    reads: Sequence[str] = ()

    def __init__(self, wanted: Wanted) -> None:
        self.wanted: Wanted | None = wanted

    def encode(self, microbatch: Microbatch, outputs: TokenOutputs | ValueOutputs) -> list[dict[str, Array]]:
        """RoleColumns.encode."""
        assert isinstance(outputs, TokenOutputs)
        assert outputs.top_ids_Nk is not None
        assert outputs.top_logprobs_Nk is not None
        tensors = (outputs.logprobs_N, outputs.top_ids_Nk, outputs.top_logprobs_Nk)
        rows = zip(*(unpack(tensor, microbatch.lengths) for tensor in tensors), strict=True)
        return [dict(zip(self.names, row, strict=True)) for row in rows]


def columns_by_prefix(settings: RunSettings, instance: str) -> dict[str, ReferenceLogprobs | TeacherRanking]:
    """The columns that `instance` computes, by the prefix they are asked under; "" is its own."""
    own: dict[str, ReferenceLogprobs | TeacherRanking] = {"": ReferenceLogprobs(instance)}
    distillation = settings.algorithm.distillation
    if distillation is None or instance not in distillation.instances:
        return own
    if distillation.top_k is None:
        return own | {TEACHER: ReferenceLogprobs(TEACHER)}
    # The policy reads the ranking, so ids that only the teacher's (padded) vocabulary has are left out of it.
    num_ids = vocab_size(settings.model.path)
    if distillation.top_k >= num_ids:
        raise ConfigError(
            f"algorithm.distillation.top_k {distillation.top_k} is not less than the {num_ids} ids of model.path; "
            "lower it"
        )
    return own | {TEACHER: TeacherRanking(Wanted(top_k=distillation.top_k, num_ids=num_ids))}


def build(settings: RunSettings, instance: str, connection: Connection, hooks: ProcessHooks = UNWATCHED) -> ColumnRanks:
    """Starts the reference on this rank, its model loaded; a collective. ConfigError."""
    section, path = config.section(settings, instance), config.model_path(settings, instance)
    context = start_store_context(
        settings, section, connection, path=path, head="policy", optimizer=None, total_steps=1, hooks=hooks
    )
    return ColumnRanks(context, columns_by_prefix(settings, instance))
