"""The real controller as a process, behind the driver's links."""

import sys

from rolecall.rpc.role_process import parse_args, run
from services.controller.__main__ import serve_controller
from tests.chaos.wiring import hook_of, through_the_wire


def main() -> int:
    """Exit code of the process."""
    args = through_the_wire(parse_args("controller"), "controller")
    hook_of(args.settings, args.worker).at("starting")
    return run(lambda: serve_controller(args), "controller", has_end=True)


if __name__ == "__main__":
    sys.exit(main())
