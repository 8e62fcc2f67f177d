"""The `rolecall` command: sft, train, check and serve from a configuration, and its keys; status, watch, pause, resume,
stop and profile a run; audit its ledger; rewind it; ask a role for its health; write the contracts of services, and
hold one to its own; list an environment's tasks; score a file; evaluate a model; write manifests; export.

Parses arguments and the configuration first and imports heavy things after, so that --help and mistakes are answered at
once. Exit codes: 0 done, 1 failed, 2 bad usage or configuration, 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Collection, Sequence

from rolecall.commands.arguments import ROLES, SERVED, command_line
from rolecall.terminal import did_you_mean, exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (None: sys.argv) and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _main(words))


def _main(words: list[str]) -> int:
    if words[:1] == ["serve"] and len(words) > 1 and words[1] in SERVED:
        return _become(f"services.{words[1].replace('-', '_')}", words[2:])
    if words[:1] == ["export"]:
        return _become("rolecall.training.export", words[1:])
    if words[:1] == ["score"]:
        return _become("services.reward.score", words[1:])
    parser, commands = command_line()
    _refuse_unknown(parser, words, commands)
    return _run(*parser.parse_known_args(words))


def _refuse_unknown(parser: argparse.ArgumentParser, words: Sequence[str], commands: Collection[str]) -> None:
    """Says which command or role a word that is none was meant to be."""
    known = [("command", commands)] + ([("role", SERVED)] if words[:1] == ["serve"] else [])
    for (what, names), word in zip(known, words, strict=False):
        if word not in names and not word.startswith("-"):
            parser.error(f"there is no {what} {word!r}{did_you_mean(word, names)}; there are {', '.join(names)}")


def _run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Runs a command; those that read a run's file take keys of it in `rest`."""
    from rolecall.config_file import overrides_from

    if arguments.command == "health":
        from rolecall.commands.health import health

        return health(arguments, ROLES, overrides_from(rest, ("--live", "--name", "--tls")))
    from rolecall.settings import is_of_sft, load_settings, require_home

    checks = arguments.command == "check" and arguments.recipe is None
    if arguments.command == "sft" or (checks and is_of_sft(arguments.config, overrides_from(rest, ("--recipe",)))):
        return _sft(arguments, overrides_from(rest, ("--resume",)))
    if arguments.command in ("train", "check"):
        from rolecall.launcher.placed import load_unplaced

        overrides = overrides_from(rest, ("--recipe", "--resume"))
        settings = load_unplaced(arguments.config, overrides, arguments.recipe, sys.stdout)
        if not _say_where(overrides):
            require_home(arguments.config, settings.run)
        if arguments.command == "check":
            from rolecall.commands.check import check

            return check(settings, sys.stdout)
        from rolecall.commands.check import require
        from rolecall.launcher.run_dir import require_place
        from rolecall.launcher.supervisor import train

        require_place(settings, resume=arguments.resume)
        require(settings, sys.stdout)
        return train(settings, resume=arguments.resume)
    if arguments.command == "evaluate":
        from rolecall.commands.evaluate import OPTIONS, evaluate

        return evaluate(arguments, overrides_from(rest, OPTIONS), sys.stdout)
    if arguments.command == "store-acl":
        from rolecall.commands.store_acl import store_acl

        settings = load_settings(arguments.config, overrides_from(rest, ("--once",)))
        return store_acl(settings, arguments.directory, sys.stdout, once=arguments.once)
    if arguments.command == "manifests":
        from rolecall.commands.manifests import manifests

        return manifests(arguments, overrides_from(rest, ("--out", "--recipe", "--to")), sys.stdout)
    if rest:
        from rolecall.errors import ConfigError

        raise ConfigError(f"unexpected argument {rest[0]!r}; see rolecall {arguments.command} --help")
    return _run_as_it_stands(arguments)


def _sft(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Runs `sft`, or `check` of a file of it."""
    from rolecall.settings import load_sft_settings, require_home

    settings = load_sft_settings(arguments.config, overrides)
    if not _say_where(overrides):
        require_home(arguments.config, settings.run)
    if arguments.command == "check":
        from rolecall.commands.check import check

        return check(settings, sys.stdout)
    from rolecall.commands.sft import sft

    return sft(settings, resume=arguments.resume)


def _say_where(overrides: Sequence[str]) -> bool:
    """Whether `overrides` name the run's folder, so that no other need be meant."""
    return any(override.startswith("run.dir=") for override in overrides)


def _run_as_it_stands(arguments: argparse.Namespace) -> int:
    """Runs a command that takes no keys of a run's file."""
    if arguments.command == "settings":
        from rolecall.commands.settings import settings

        return settings(arguments.of, arguments.key, sys.stdout)
    if arguments.command == "certificates":
        from rolecall.commands.certificates import certificates

        return certificates(
            arguments.directory,
            arguments.run,
            arguments.host,
            days=arguments.days,
            renew=arguments.renew,
            spiffe_id=arguments.spiffe_id,
        )
    if arguments.command == "conformance":
        from rolecall.commands.conformance import conformance

        return conformance(arguments, sys.stdout)
    if arguments.command == "protos":
        from rolecall.commands.protos import protos

        return protos(arguments.directory, sys.stdout)
    if arguments.command == "tasks":
        from rolecall.environment.listing import tasks

        return tasks(arguments, sys.stdout)
    if arguments.command == "ledger":
        from rolecall.commands.ledger import ledger

        return ledger(arguments.run, arguments.id, arguments.json, sys.stdout)
    if arguments.command == "rewind":
        from rolecall.launcher.rewind import rewind

        return rewind(arguments.run, arguments.step, sys.stdout)
    from rolecall.commands.steer import find, profile, steer
    from rolecall.rpc.callers import Caller

    if arguments.command == "profile":
        return profile(find(arguments.run, Caller.OPERATOR, arguments.tls), arguments.role, arguments.steps)
    if arguments.command == "status":
        return steer("status", arguments.run, tls=arguments.tls, as_json=arguments.json)
    checkpoint = arguments.command == "stop" and arguments.checkpoint
    return steer(arguments.command, arguments.run, tls=arguments.tls, checkpoint=checkpoint)


def _become(module: str, rest: list[str]) -> int:
    """Becomes another process. -P: a `services` folder where the user stands must not shadow ours."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *rest])
