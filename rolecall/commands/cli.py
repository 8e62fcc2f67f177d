"""The `rolecall` command: sft, train, check and serve from a configuration; status, watch, pause, resume and
stop a run; audit its ledger; export.

Parses arguments and the configuration first and imports heavy things after, so that --help and mistakes are answered at
once. Exit codes: 0 done, 1 failed, 2 bad usage or configuration, 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from rolecall.nearest import did_you_mean

ROLES = ("controller", "actor", "critic", "reference", "reward", "rollout")

_OVERRIDES = "Any key of the file can be overridden: --section.key value (read as YAML), e.g. --run.num_steps 3."
_RUN_HELP = "a run directory, its configuration file, or the controller's host:port"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (None: sys.argv) and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["serve"] and len(words) > 1 and words[1] in ROLES:
        return _become(f"services.{words[1]}", words[2:])
    if words[:1] == ["export"]:
        return _become("rolecall.training.export", words[1:])
    parser, commands = _parser()
    _refuse_unknown(parser, words, commands)
    arguments, rest = parser.parse_known_args(words)
    from rolecall.errors import ConfigError, RoleCallError, print_error

    try:
        return _run(arguments, rest)
    except ConfigError as error:
        print_error(error.message)
        return 2
    except RoleCallError as error:
        print_error(error.message)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> tuple[argparse.ArgumentParser, Collection[str]]:
    """Returns the parser, and the names of the commands."""
    parser = argparse.ArgumentParser(
        prog="rolecall",
        description="RL post-training for language models in which every role is a service.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help: str, epilog: str | None = None) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=help, description=help, epilog=epilog, allow_abbrev=False)

    train = command("train", "start every local role of a run, show its progress, and end them all with it", _OVERRIDES)
    train.add_argument("config", type=Path, metavar="CONFIG", help="the run's YAML file")
    train.add_argument("--resume", action="store_true", help="go on with the run in run.dir")
    check = command(
        "check", "validate a configuration without starting anything, and print what follows from it", _OVERRIDES
    )
    check.add_argument("config", type=Path, metavar="CONFIG", help="the run's YAML file")
    for reader in (train, check):
        reader.add_argument(
            "--recipe",
            metavar="NAME|FILE",
            help="a method's keys (a name of rolecall/recipes/, or a file), for what CONFIG does not set",
        )
    sft = command("sft", "fine-tune a model on examples (prompts with responses), for a run to start from", _OVERRIDES)
    sft.add_argument("config", type=Path, metavar="CONFIG", help="the YAML file (rolecall/settings/sft.py)")
    sft.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in run.dir")
    serve = command("serve", "run one role: rolecall serve ROLE CONFIG [--name INSTANCE]", _OVERRIDES)
    serve.add_argument("role", choices=ROLES, metavar="ROLE", help=", ".join(ROLES))
    for name, help in [
        ("status", "print the run as it stands"),
        ("watch", "follow the run until it ends"),
        ("pause", "admit no new prompts; what is in flight finishes"),
        ("resume", "admit prompts again"),
        ("stop", "end the run after the step in progress"),
    ]:
        command(name, help).add_argument("run", metavar="RUN", help=_RUN_HELP)
    command(
        "export",
        "write a checkpoint as a plain Hugging Face model directory: rolecall export CHECKPOINT DIR; see rolecall "
        "export --help",
    )
    ledger = command(
        "ledger",
        "print and check what became of every group of a run, live or after a crash; exit code 1 when it does not "
        "balance",
    )
    ledger.add_argument("run", metavar="RUN", help="a run directory or a configuration file")
    ledger.add_argument("--id", metavar="ID", help="tell the history of one group (12) or trajectory (12/3) instead")
    ledger.add_argument("--json", action="store_true", help="for programs")
    commands.choices["status"].add_argument("--json", action="store_true", help="for programs")
    commands.choices["stop"].add_argument("--checkpoint", action="store_true", help="save a checkpoint before ending")
    return parser, commands.choices


def _refuse_unknown(parser: argparse.ArgumentParser, words: Sequence[str], commands: Collection[str]) -> None:
    """Says which command or role a word that is none was meant to be."""
    known = [("command", commands)] + ([("role", ROLES)] if words[:1] == ["serve"] else [])
    for (what, names), word in zip(known, words, strict=False):
        if word not in names and not word.startswith("-"):
            parser.error(f"there is no {what} {word!r}{did_you_mean(word, names)}; there are {', '.join(names)}")


def _run(arguments: argparse.Namespace, rest: list[str]) -> int:
    from rolecall.settings import load_settings, overrides_from

    if arguments.command in ("train", "check"):
        settings = load_settings(arguments.config, overrides_from(rest, ("--recipe", "--resume")), arguments.recipe)
        if arguments.command == "check":
            from rolecall.commands.check import check

            return check(settings, sys.stdout)
        from rolecall.commands.check import require
        from rolecall.launcher.supervisor import train

        require(settings, sys.stdout)
        return train(settings, resume=arguments.resume)
    if arguments.command == "sft":
        from rolecall.settings import load_sft_settings

        sft_settings = load_sft_settings(arguments.config, overrides_from(rest, ("--resume",)))
        from rolecall.commands.sft import sft as fine_tune

        return fine_tune(sft_settings, resume=arguments.resume)
    if rest:
        from rolecall.errors import ConfigError

        raise ConfigError(f"unexpected argument {rest[0]!r}; see rolecall {arguments.command} --help")
    if arguments.command == "ledger":
        from rolecall.commands.ledger import ledger

        return ledger(arguments.run, arguments.id, arguments.json, sys.stdout)
    from rolecall.commands.steer import steer

    if arguments.command == "status":
        return steer("status", arguments.run, as_json=arguments.json)
    return steer(arguments.command, arguments.run, checkpoint=arguments.command == "stop" and arguments.checkpoint)


def _become(module: str, rest: list[str]) -> int:
    """Becomes another process. -P: a `services` folder where the user stands must not shadow ours."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *rest])
