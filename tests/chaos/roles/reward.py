"""The real reward service as a process, behind the driver's links."""

import sys

from rolecall.rpc.role_process import parse_args, run
from services.reward.__main__ import serve_reward
from tests.chaos.wiring import hook_of, through_the_wire


def main() -> int:
    """Exit code of the process."""
    args = through_the_wire(parse_args("reward"), "reward")
    hook_of(args.settings, args.worker).at("starting")
    return run(lambda: serve_reward(args), "reward")


if __name__ == "__main__":
    sys.exit(main())
