"""A reference on its ranks: logprobs of sampled tokens under frozen weights, and what a teacher says besides. Knows
tensors and no gRPC.
"""

from collections.abc import Mapping, Sequence

from rolecall.columns import TEACHER, TOPK_IDS, TOPK_LOGPROBS, reference_column
from rolecall.data.model.files import vocab_size
from rolecall.errors import ConfigError, ConflictError
from rolecall.settings import RunSettings
from rolecall.shifts import Post
from rolecall.store.connection import Connection
from rolecall.training.engine import Microbatch, TokenOutputs, ValueOutputs
from rolecall.training.model.logits.logprobs import Wanted
from rolecall.training.packing.pack import unpack
from rolecall.training.serving.hooks import ProcessHooks
from rolecall.training.step.rank_context import StoreRankContext
from rolecall.training.step.role_ranks import ColumnRanks, RoleColumns
from rolecall.training.step.start import start_store_context
from rolecall.v1 import training_pb2
from rolecall.v1.trajectory_pb2 import RowRef
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


class ReferenceRanks(ColumnRanks):
    """A reference over the ranks of a group, which holds memory of a device that it leaves to others in the references'
    shift alone: from a column that is asked for to Offload.
    """

    def __init__(self, context: StoreRankContext, columns: Mapping[str, RoleColumns], post: Post | None) -> None:
        """`post`, where it leaves its device to others, is this rank's own: a rank may outlive the first for a while.
        It has left when this returns.
        """
        super().__init__(context, columns)
        self._post = post
        if post is not None:
            context.state.offload()

    def _compute(self, rows: Sequence[RowRef], prefix: str) -> frozenset[str]:
        if self._post is not None:
            self.group.agree(self._enter)
            self._move([training_pb2.STATE_PART_PARAMETERS], to_host=False)
        return super()._compute(rows, prefix)

    def _enter(self) -> None:
        assert self._post is not None
        if not self._post.take():
            raise ConflictError(
                "the devices are not the references' now; ask for columns in their shift (rolecall/shifts.py)"
            )

    def _move(self, parts: Sequence[training_pb2.StatePart.ValueType], to_host: bool) -> None:
        super()._move(parts, to_host)
        if to_host and self._post is not None and training_pb2.STATE_PART_PARAMETERS in parts:
            self._post.leave()


def build(settings: RunSettings, instance: str, connection: Connection, hooks: ProcessHooks) -> ReferenceRanks:
    """Starts the reference on this rank, its model loaded; a collective. ConfigError."""
    section, path = config.section(settings, instance), config.model_path(settings, instance)
    context = start_store_context(
        settings, section, connection, path=path, head="policy", optimizer=None, total_steps=1, hooks=hooks
    )
    post = Post(settings.run.dir, "references") if section.offload else None
    return ReferenceRanks(context, columns_by_prefix(settings, instance), post)
