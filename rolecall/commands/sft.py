"""`rolecall sft`: checks the file, the model and the examples, then starts its ranks and waits for them. No torch.

The run directory is laid out as a run's: config.yaml, logs/sft.log, metrics.jsonl, checkpoints/. No store and no
service is needed.
"""

import os
import signal
import subprocess
from contextlib import suppress
from itertools import islice

from rolecall.commands.check.capacity import require_gpus
from rolecall.commands.check.footprint import checkpoints
from rolecall.data.adapters import check_start, num_adapter_parameters
from rolecall.data.image_limits import check_sft_images
from rolecall.data.images.spool import without_spools
from rolecall.data.megatron_limits import check_megatron, require_installed
from rolecall.data.model_files import (
    check_parallel,
    check_routers,
    check_tokenizer,
    check_trainable,
    max_model_tokens,
    read_model,
)
from rolecall.data.parameter_counts import actor_parameters
from rolecall.data.sft_examples import end_of_response, load_examples, tokenize
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import ConfigError, RoleCallError
from rolecall.identity import adapters_to_begin_with, settle
from rolecall.launcher.last_words import describe_failure, final_line
from rolecall.launcher.plan import (
    prepare_run_dir,
    ranks_command,
    require_folders,
    role_environment,
    write_config,
)
from rolecall.launcher.processes import STARTED, STOP_TIMEOUT_S, Worker
from rolecall.launcher.tell_trackers import tell_trackers
from rolecall.lifeline import tied
from rolecall.settings import SftSettings, child_environment
from rolecall.terminal import INTERRUPTED, USAGE, say
from rolecall.trackers import require as require_trackers

NUM_TRIED = 100
"""Examples of each file that are rendered before anything starts: what a template cannot show is mostly in the first.
"""


def require(settings: SftSettings) -> None:
    """ConfigError names what is wrong with the GPUs, the model, the disk or the data, before anything is started."""
    path, actor = settings.model.path, settings.actor
    require_folders(settings.run)
    for _ in require_trackers(settings.trackers):
        pass
    require_gpus("actor", actor.devices, actor.num_ranks)
    facts = read_model(path)
    check_trainable(path)
    check_parallel(path, actor.parallel)
    if actor.backend == "megatron":
        require_installed()
        check_megatron(path, actor.parallel, actor.megatron, actor.num_ranks)
    visual_tokens = check_sft_images(settings)
    check_routers(path, actor.moe, settings.model.freeze_routers)
    if (lora := adapters_to_begin_with(settings, settings.actor.lora)) is not None:
        num_adapter_parameters(path, lora)
        check_start(lora, path)
    for _ in checkpoints(settings, [(actor_parameters(settings, facts), settings.actor.lora)]):
        pass
    tokenizer = ChatTokenizer.of(settings.model)
    check_tokenizer(path, tokenizer.num_ids)
    end = end_of_response(path, tokenizer)
    longest = max_model_tokens(path)
    if settings.data.max_tokens > longest:
        raise ConfigError(f"data.max_tokens {settings.data.max_tokens} exceeds the model's {longest} tokens; lower it")
    files = [("data.train", file) for file in settings.data.train]
    if settings.evaluation is not None:
        files.append(("evaluation.path", settings.evaluation.path))
    for setting, file in files:
        examples = load_examples(file, settings.data, setting, lambda what: say(f"starting  reading {what}\n"))
        tried = tokenize(islice(examples, NUM_TRIED), tokenizer, end, settings.data.max_tokens, visual_tokens)
        if tried.unshown:
            say(
                f"starting  {setting}: {len(tried.unshown)} of the first examples cannot be shown and will be left "
                f"out; the first: {tried.unshown[0]}\n"
            )
        for _ in examples:
            pass  # each line is looked at


def sft(settings: SftSettings, *, resume: bool) -> int:
    """Runs `settings` to its end and returns the exit code: 0 done, 130 interrupted. Call it from the main thread.
    ConfigError or RoleCallError says what its ranks failed of.
    """
    say("starting  checking the model and the examples\n")
    require(settings)
    lock = prepare_run_dir(settings, resume=resume)
    try:
        settle(settings)
        worker = _plan(settings, resume)
        say(f"starting  the ranks, whose log is {worker.log}\n")
        with without_spools(settings.run.dir):
            code = _run(worker)
        if code == 0:
            say(
                f"done: checkpoints in {settings.run.checkpoints}\n"
                f"a run starts from it with model.path MODEL, a new directory:  rolecall export {settings.run.dir} "
                "MODEL\n"
            )
            return 0
        tell_trackers(settings, worker)
        if code == INTERRUPTED:
            say("interrupted: --resume goes on from the newest checkpoint\n")
            return code
        failed = ConfigError if code == USAGE else RoleCallError
        raise failed(final_line(worker) or describe_failure(worker, code))
    finally:
        os.close(lock)


def _plan(settings: SftSettings, resume: bool) -> Worker:
    arguments = ["rolecall.training.sft", str(write_config(settings)), *(["--resume"] if resume else [])]
    # "1": ranks under torchrun are tied to torchrun.
    environment = {**role_environment(settings.actor, settings.actor.num_threads), "ROLECALL_DIE_WITH_PARENT": "1"}
    return Worker(
        "sft",
        "sft",
        ranks_command(settings.actor.num_ranks, arguments),
        environment,
        settings.run.dir / "logs" / "sft.log",
    )


def _run(worker: Worker) -> int:
    """Runs the ranks and returns their exit code, or INTERRUPTED where this process is asked to stop. Progress goes to
    our stdout, everything else to the log.
    """
    with worker.log.open("ab") as log:
        log.write(f"{STARTED} {worker.name}\n".encode())
        log.flush()
        process = subprocess.Popen(
            tied(worker.command),
            stdin=subprocess.DEVNULL,
            stderr=log,
            env=child_environment(worker.environment),
            start_new_session=True,  # else a terminal would interrupt the ranks, too, and twice
        )
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, signal.default_int_handler)
    try:
        return process.wait()  # bounded: by the training, whose ranks watch each other
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        return 0 if process.returncode == 0 else INTERRUPTED  # 0: it had just ended
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
