"""The training back ends by their names in the settings: the one place that knows which there are.

A back end is a folder with an engine, which is both seams of rolecall/training/engine.py at once, and a reader of the
checkpoints that it writes. Another one takes a folder of its own, a case in each function here, and a name in
`rolecall.settings.TrainingBackend`. A back end is imported where it is chosen, so that its libraries need not be
installed for another's.
"""

from collections.abc import Callable, Sequence

import torch

from rolecall.checkpoint.manifest import StoredFile
from rolecall.checkpoint.storage import Storage
from rolecall.data.megatron.limits import require_installed
from rolecall.settings import TrainingBackend
from rolecall.training.account.memory import PhaseMemory
from rolecall.training.engine import EngineState, SavedModel, TrainingEngine
from rolecall.training.options import EngineOptions


def make_engine(
    backend: TrainingBackend,
    options: EngineOptions,
    *,
    device: torch.device,
    memory: PhaseMemory,
    progressed: Callable[[], None],
) -> tuple[TrainingEngine, EngineState]:
    """Loads the model on this rank and returns what computes on it and what keeps its state, one object or two.

    A collective of torch's default process group, which must exist. `memory` counts what each phase uses, `progressed`
    is called whenever a part of the work is done. ConfigError when the back end cannot run the model as asked.
    """
    match backend:
        case "fsdp":
            from rolecall.training.fsdp.engine import FsdpEngine

            engine = FsdpEngine(options, device=device, memory=memory, progressed=progressed)
            return engine, engine
        case "megatron":
            return _megatron(options, device, memory, progressed)


def read_model(storage: Storage, files: Sequence[StoredFile]) -> SavedModel:
    """Opens the model in a trainer's share of a checkpoint, whose `files` are those of its manifest.

    CheckpointMissingError, CheckpointMismatchError. Every back end writes the one format of rolecall/training/state/.
    """
    from rolecall.training.state.saved_model import ShardedModel

    return ShardedModel(storage, files)


def _megatron(
    options: EngineOptions, device: torch.device, memory: PhaseMemory, progressed: Callable[[], None]
) -> tuple[TrainingEngine, EngineState]:
    require_installed()
    from rolecall.training.megatron.engine import MegatronEngine

    engine = MegatronEngine(options, device=device, memory=memory, progressed=progressed)
    return engine, engine
