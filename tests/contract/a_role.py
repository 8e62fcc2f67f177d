"""A role for the process tests: `python -m tests.contract.a_role HOW CONFIG ...` serves nothing, and ends in the way
HOW says.
"""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rolecall import telemetry
from rolecall.errors import BudgetSpentError, CheckpointMismatchError, WorkerLostError
from rolecall.rpc import role_process
from rolecall.rpc.role_process import ServiceArgs
from rolecall.rpc.server import Server


async def say_drained() -> None:
    """Says when it drains."""
    say("drained")


async def serve(args: ServiceArgs, **how: Any) -> None:
    """Until it is stopped; says when it is up and when it drains."""
    server = Server(args.settings.rpc, "127.0.0.1:0")
    await server.start()
    say("up")
    await role_process.serve(server, **{"drain": say_drained, "grace_s": 0.5, **how})


async def lose_a_rank(args: ServiceArgs) -> None:
    """Serves until something in the background fails."""
    failed = asyncio.get_running_loop().create_future()
    failed.set_exception(WorkerLostError("rank 1 died in backward; see actor.1.log"))
    await serve(args, failed=failed)


async def be_lost(args: ServiceArgs) -> None:
    """Serves until the controller gives it up."""
    failed = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.1, failed.set_exception, WorkerLostError("no progress for 30 s"))
    await serve(args, failed=failed, grace_s=30.0)


async def be_stopped_before_the_end(args: ServiceArgs) -> None:
    """Serves, as a role does that comes to an end by itself."""
    await serve(args)


async def be_asked_to_stop(args: ServiceArgs) -> None:
    """Serves until a thread of its own asks it to stop, and gets a signal while it drains."""
    role_process.stop_requested()
    threading.Thread(target=role_process.way_to_stop()).start()
    await serve(args, drain=drain_through_a_signal, grace_s=60.0)


async def drain_through_a_signal() -> None:
    """Says that it drained, unless the signal cancelled it."""
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.5)  # its handler runs with the event loop's next turn
    say("drained")


async def be_cancelled(args: ServiceArgs) -> None:
    """Serves until its work ends as cancelled, which nobody here asked for."""
    failed = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.1, failed.cancel)
    await serve(args, failed=failed)


async def hang_in_drain(args: ServiceArgs) -> None:
    """Cannot give its work back."""
    await serve(args, drain=lambda: asyncio.sleep(60), grace_s=0.3)


async def hang_for_good(args: ServiceArgs) -> None:
    """Blocks its event loop; a thread hears that it was given up."""
    leave = role_process.way_out("actor")
    threading.Thread(target=leave, args=[WorkerLostError("no progress for 30 s")], daemon=True).start()
    say("up")
    time.sleep(60)


async def refuse(args: ServiceArgs) -> None:
    """Meets what no restart mends."""
    raise CheckpointMismatchError("the checkpoint is of another model")


async def spend_a_budget(args: ServiceArgs) -> None:
    """Ends as its settings say."""
    raise BudgetSpentError("filters dropped 6 groups within a step")


async def crash(args: ServiceArgs) -> None:
    """Fails with its server still open."""
    await Server(args.settings.rpc, "127.0.0.1:0").start()
    raise ValueError("shape (3, 4) is not (4, 3)")


async def crash_natively(args: ServiceArgs) -> None:
    """Ends as a library does that reads memory which is not its own."""
    os.kill(os.getpid(), signal.SIGSEGV)


async def load(args: ServiceArgs) -> None:
    """Is still starting when it is stopped."""
    say("up")
    await asyncio.sleep(60)


async def hang(args: ServiceArgs) -> None:
    """Has a thread that never ends."""
    _stuck = asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1, "device"), time.sleep, 60)
    say("up")
    await role_process.stop_requested().wait()


async def block_at_its_end(args: ServiceArgs) -> None:
    """Ends when told, and blocks its event loop then, as a gRPC server can that nobody stopped."""
    _blocks = await what_blocks_when_cancelled()
    say("up")
    await role_process.stop_requested().wait()


async def fail_and_block(args: ServiceArgs) -> None:
    """Fails, and blocks alike."""
    _blocks = await what_blocks_when_cancelled()
    raise ValueError("shape (3, 4) is not (4, 3)")


async def what_blocks_when_cancelled() -> asyncio.Task[None]:
    """A task at work."""

    async def block() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            time.sleep(60)

    task = asyncio.create_task(block())
    await asyncio.sleep(0)
    return task


async def who(args: ServiceArgs) -> None:
    """Says who it is, and which start of it this is."""
    say(f"{args.worker} {args.settings.run.num_steps} {args.incarnation}")


def say(word: str) -> None:
    """To the test."""
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    args = role_process.parse_args("actor", sys.argv[2:])
    telemetry.configure(args.settings.telemetry, "actor", args.worker)
    way: Callable[[ServiceArgs], Awaitable[None]] = globals()[sys.argv[1]]
    sys.exit(role_process.run(lambda: way(args), "actor", has_end=way in (be_stopped_before_the_end, be_asked_to_stop)))
