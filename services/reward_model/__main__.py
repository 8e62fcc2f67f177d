"""Starts a reward model: `rolecall serve reward-model model.yaml`; with num_ranks > 1, under torchrun."""

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from rolecall.config_file import overrides_from
from rolecall.errors import ConfigError, DeadlineError
from rolecall.rpc import role_process
from rolecall.settings import RewardModelSettings, load_reward_model_settings, load_settings, rank_of_process

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the process."""
    parser = argparse.ArgumentParser(
        prog="rolecall serve reward-model",
        description="serve a reward model: a classification model behind the public contract of a scorer",
        epilog="Any key of the file can be overridden: --section.key value (read as YAML).",
        allow_abbrev=False,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the YAML file (rolecall/settings/reward_model.py)")
    parser.add_argument("--name", help="of a run's file: which of its reward.servers")
    arguments, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    try:
        settings = _settings(arguments.config, overrides_from(rest), arguments.name)
    except ConfigError as error:
        sys.stderr.write(f"reward-model failed: {error.message}\n")
        return role_process.USAGE
    return role_process.run(lambda: _serve(settings), settings.name)


def _settings(file: Path, overrides: list[str], name: str | None) -> RewardModelSettings:
    """`name`: of a server in a run's file; None: the file is a reward model's."""
    if name is None:
        return load_reward_model_settings(file, overrides)
    from services.reward_model.config import config_of_server  # gRPC, which configuration errors need not wait for

    return config_of_server(load_settings(file, overrides), name)


async def _serve(settings: RewardModelSettings) -> None:
    with role_process.importing():
        from rolecall import telemetry
        from rolecall.data.tokenizer import ChatTokenizer
        from rolecall.reward import Scorer, new_server
        from rolecall.rpc.tls import read_token
        from rolecall.training.serving.device_thread import DeviceThread
        from rolecall.training.serving.hooks import ProcessHooks
        from services.reward_model import config
        from services.reward_model.batcher import TokenBatcher
        from services.reward_model.conversations import Conversations
        from services.reward_model.ranks import build
        from services.reward_model.service import ModelScores

    telemetry.configure(settings.telemetry, "reward", settings.name, rpc=settings.rpc)
    tokenizer = ChatTokenizer(settings.path)
    config.check_files(settings, tokenizer.num_ids)
    conversations = Conversations(settings, tokenizer, config.max_tokens(settings))
    spec = config.describe(settings)
    folder = Path.cwd()
    way_out = role_process.way_out(settings.name)
    if rank_of_process()[0] > 0:
        role_process.stop_requested()  # rank 0 says when the others leave
        await asyncio.to_thread(lambda: build(settings, folder, ProcessHooks(settings.name, lost=way_out)).follow())
        return
    device_thread = DeviceThread()
    telemetry.show_states(device_thread.states)
    hooks = ProcessHooks(settings.name, device_thread.progressed, way_out)
    logger.info("%s loads %s, within start_timeout_s = %g s", settings.name, settings.path, settings.start_timeout_s)
    try:
        async with asyncio.timeout(settings.start_timeout_s):
            ranks = await device_thread.run(lambda: build(settings, folder, hooks), "loading the model")
    except TimeoutError as error:
        raise DeadlineError(
            f"the model was still loading after start_timeout_s = {settings.start_timeout_s:g} s"
        ) from error
    batcher = TokenBatcher(
        lambda sequences: device_thread.run(lambda: ranks.outputs_of(sequences), "computing"),
        settings.token_budget * ranks.num_slots,
    )
    scores = ModelScores(conversations, batcher, spec)
    server = new_server(
        Scorer(spec, scores.score, read_token(settings.bearer_token_file)), settings.bind or "", settings.rpc
    )
    batcher.start()
    if ranks.world_size > 1:
        device_thread.start_keep_alive(ranks.keep_alive)
    try:
        address = await server.start()
        await server.set_serving(True)
        logger.info("%s serves %s on %s", settings.name, settings.path, address)
        await role_process.serve(server, failed=device_thread.failed)
    finally:
        await batcher.close()
        await device_thread.close(ranks.stop)


if __name__ == "__main__":
    sys.exit(main())
