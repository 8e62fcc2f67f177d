"""Starts the ranks of a trainer through torchrun and ends with the code of the rank that failed first: by it whoever
supervises a trainer decides, and torchrun's own says 1 whatever happened.

    python -P -m rolecall.training.ranks.torchrun --nproc-per-node=2 ... -m services.actor run.yaml

The arguments are torchrun's, and one rendezvous more, for the ranks of one machine: `--rdzv-backend=loopback`. Of
several nodes each has one of these, which speaks for the ranks of its node.
"""

import socket
import sys
import tempfile
import traceback

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, though not in __all__
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.run import main as torchrun

from rolecall.rpc.role_process import RESTART

LOOPBACK = "loopback"
"""Name of the rendezvous."""
_HOST = "127.0.0.1"


class LoopbackRendezvous(RendezvousHandler):
    """The meeting of one node with itself. Its store, which the ranks share, listens on 127.0.0.1 alone: those of
    torch's own rendezvous listen on every interface, and unpickle what they hold.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        """Begins to listen."""
        self._run_id, self._closed = parameters.run_id, False
        listener = socket.create_server((_HOST, 0))
        port = int(listener.getsockname()[1])
        self._store = TCPStore(  # bounded: by nothing to wait for, it is the server
            _HOST, port, None, True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
        )

    def get_backend(self) -> str:
        """RendezvousHandler.get_backend."""
        return LOOPBACK

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks use this store, and make none."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """This node as the only one."""
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(_HOST, self._store.port))

    def is_closed(self) -> bool:
        """RendezvousHandler.is_closed."""
        return self._closed

    def set_closed(self) -> None:
        """RendezvousHandler.set_closed."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Returns 0: there is no other node."""
        return 0

    def get_run_id(self) -> str:
        """RendezvousHandler.get_run_id."""
        return str(self._run_id)

    def shutdown(self) -> bool:
        """RendezvousHandler.shutdown."""
        self._closed = True
        return True


def main() -> int:
    """Runs the command line and returns the exit code."""
    rendezvous_handler_registry.register(LOOPBACK, LoopbackRendezvous)
    try:
        # The ranks' error files: torchrun would leave a folder of them for each start.
        with tempfile.TemporaryDirectory(prefix="rolecall-ranks-") as logs:
            torchrun(["--log-dir", logs, *sys.argv[1:]])
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
