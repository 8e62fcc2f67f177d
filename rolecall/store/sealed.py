"""The part of the ledger that services read which are not its controller: sealed batches and the fencing number."""

from rolecall.errors import NotFoundError
from rolecall.store.connection import Connection
from rolecall.v1.trajectory_pb2 import TrainBatch


def read_sealed(connection: Connection, run: str, step: int) -> TrainBatch:
    """The sealed batch that makes `step`. NotFoundError when it is not sealed, or its rows were freed."""
    data = connection.command("HGET", f"{{rl:{run}}}:batch:{step}", "group")
    if data is None:
        raise NotFoundError(
            f"run {run}: the store holds no sealed batch for step {step}; it is not sealed yet, or was freed after "
            "a checkpoint"
        )
    return TrainBatch.FromString(data)


def read_ctl(connection: Connection, run: str) -> int:
    """The fencing number of the run's controller; 0 before the first. A service refuses calls that carry a lower
    one.
    """
    return int(connection.command("HGET", f"{{rl:{run}}}:run", "ctl") or 0)
