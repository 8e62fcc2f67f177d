"""The process of vLLM's scheduler, where it begins as a fork of the replica's."""

import logging
import os
import signal

from rolecall.rpc.role_process import tie_to_parent
from rolecall.settings import tied_to_this_process

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def fork_core() -> None:
    """Has vLLM begin its scheduler as a fork of this process, which has torch and vLLM imported: else it imports them
    again, half of the CPU time of a start. Call it after vLLM's configuration is made, which on CPUs chooses otherwise.
    """
    os.environ[METHOD] = "fork"
    os.register_at_fork(after_in_child=_begin)


def _begin() -> None:
    signal.set_wakeup_fd(-1)  # by it the replica's event loop would take signals to this process for its own
    os.environ[METHOD] = "spawn"  # of workers, whose threads are bound while OpenMP is loaded
    tie_to_parent()
    os.environ.update(tied_to_this_process())
    logging.getLogger().setLevel(logging.WARNING)  # the replica says what is done, and this process what goes wrong
