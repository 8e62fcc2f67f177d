"""Starts the ranks of a trainer through torchrun and ends with the code of the rank that failed first: by it whoever
supervises a trainer decides, and torchrun's own says 1 whatever happened.

    python -P -m rolecall.training.ranks.torchrun --nproc-per-node=2 ... -m services.actor run.yaml

The arguments are torchrun's. Of several nodes each has one of these, which speaks for the ranks of its node.
"""

import sys
import traceback

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from rolecall.rpc.role_process import RESTART


def main() -> int:
    """Runs the command line and returns the exit code."""
    try:
        torchrun()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.stderr.write(f"torchrun: rank {rank} ended first, with exit code {failure.exitcode}\n")
        return failure.exitcode if failure.exitcode > 0 else RESTART  # negative: a signal ended it
    except SignalException as signalled:
        return 128 + signalled.sigval
    except Exception:  # an edge: a node that is away, a store that ended; what may pass
        traceback.print_exc()
        return RESTART
    return 0


if __name__ == "__main__":
    sys.exit(main())
