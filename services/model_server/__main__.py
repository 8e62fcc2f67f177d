"""A model server as a process: settings, environment, and then vLLM's own server, as `vllm serve` starts it."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rolecall.config_file import overrides_from
from rolecall.errors import ConfigError
from rolecall.rpc import role_process
from rolecall.settings import load_settings, tied_to_this_process
from services.model_server.config import ServerConfig, configure, start_environment

# a process that vLLM spawns, before it does anything else: it may not outlive the one that spawned it, however that
# ends
if __name__ == "__mp_main__":
    role_process.tie_to_parent()
    os.environ.update(tied_to_this_process())

ROLE = "model-server"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the process."""
    parser = argparse.ArgumentParser(
        prog=f"rolecall serve {ROLE}",
        description="serve a model to the judges of a run: one of its reward.servers",
        epilog="Any key of the file can be overridden: --section.key value (read as YAML).",
        allow_abbrev=False,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the run's YAML file")
    parser.add_argument("--name", required=True, help="the server's name under reward.servers")
    arguments, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    try:
        config = configure(load_settings(arguments.config, overrides_from(rest)), arguments.name)
        environment = start_environment(config)
    except ConfigError as error:
        sys.stderr.write(f"{ROLE} failed: {error.message}\n")
        return role_process.USAGE
    return role_process.run(lambda: _serve(config, environment), ROLE)


async def _serve(config: ServerConfig, environment: dict[str, str]) -> None:
    os.environ.update({**environment, **tied_to_this_process()})
    with role_process.importing():
        from services.model_server.vllm_server import serve  # vLLM, in its environment

    await serve(config)


if __name__ == "__main__":
    # so that multiprocessing knows this file by its path: by its name it would leave a `__main__` out of the processes
    # that it spawns
    __spec__ = None
    sys.exit(main())
