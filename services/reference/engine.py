"""A reference on its ranks: logprobs of sampled tokens under frozen weights. Knows tensors and no gRPC."""

from rolecall.settings import RunSettings
from rolecall.store.connection import Connection
from rolecall.training.engine import Microbatch, TokenOutputs, ValueOutputs
from rolecall.training.packing import unpack
from rolecall.training.ranks import start_bench
from rolecall.training.share import Bench
from rolecall.training.trainer import ColumnRanks
from rolecall.training.vitals import UNWATCHED, Vitals
from rolecall.trajectory import reference_column
from rolecall.wire import Array
from services.reference import config


class ReferenceLogprobs:
    """The ColumnRecipe of the reference `instance`."""

    def __init__(self, instance: str) -> None:
        self._column = reference_column(instance)
        self.columns: tuple[str, ...] = (self._column,)

    def encode(self, microbatch: Microbatch, outputs: TokenOutputs | ValueOutputs) -> list[dict[str, Array]]:
        """ColumnRecipe.encode."""
        assert isinstance(outputs, TokenOutputs)
        return [{self._column: logprobs_T} for logprobs_T in unpack(outputs.logprobs_N, microbatch.lengths)]


def build(settings: RunSettings, instance: str, connection: Connection, vitals: Vitals = UNWATCHED) -> "ReferenceEngine":
    """This rank's engine, its model loaded; a collective. ConfigError."""
    section, path = config.section(settings, instance), config.model_path(settings, instance)
    engine, bench = start_bench(settings, section, connection, path=path, head="policy", optimizer=None, total_steps=1, vitals=vitals)
    return ReferenceEngine(instance, bench, engine.num_parameters)


class ReferenceEngine(ColumnRanks):
    """front.ColumnEngine over the ranks of a group."""

    def __init__(self, instance: str, bench: Bench, num_parameters: int) -> None:
        super().__init__(bench, ReferenceLogprobs(instance), num_parameters)
