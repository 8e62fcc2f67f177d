"""The calls of a trainer over any engine: of a real one on a tiny model, of a twin in this process, of a twin in a
chaos run.
"""

from collections.abc import Callable

from rolecall.rpc.fence import Fence
from rolecall.store.connection import Connection
from rolecall.store.sealed import read_sealed
from rolecall.training.serving.calls import TrainerCalls
from rolecall.training.serving.device_thread import DeviceThread
from rolecall.training.serving.trainer import Trainer


def trainer_calls(
    trainer: Trainer,
    connection: Connection,
    run: str,
    fence: Fence,
    checkpoints: str,
    token_budget: int = 2**20,
    worker: str = "trainer.1",
    device_thread: DeviceThread | None = None,
    make: Callable[..., TrainerCalls] = TrainerCalls,
    save_timeout_s: float = 3600.0,
) -> TrainerCalls:
    """Makes the calls of `trainer` in `run`, whose checkpoints lie below `checkpoints`."""
    device_thread = device_thread or DeviceThread()
    return make(
        trainer,
        lambda step: read_sealed(connection, run, step),
        device_thread,
        fence,
        token_budget,
        worker,
        checkpoints,
        save_timeout_s,
    )
