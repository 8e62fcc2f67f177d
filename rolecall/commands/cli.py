"""The `rolecall` command: sft, train, check and serve from a configuration; status, watch, pause, resume and
stop a run; audit its ledger; ask a role for its health; hold a scorer to its contract; score a file; write manifests;
export.

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
_TLS_HELP = "for an address: the folder of tls.crt, tls.key and ca.crt"
_RUN_HELP = "a run directory, its configuration file, or the controller's host:port"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (None: sys.argv) and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["serve"] and len(words) > 1 and words[1] in ROLES:
        return _become(f"services.{words[1]}", words[2:])
    if words[:1] == ["export"]:
        return _become("rolecall.training.export", words[1:])
    if words[:1] == ["score"]:
        return _become("services.reward.score", words[1:])
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
    manifests = command("manifests", "write what deploys a run in containers, from its file", _OVERRIDES)
    manifests.add_argument(
        "config", type=Path, metavar="CONFIG", help="the run's YAML file, with paths as containers see them"
    )
    manifests.add_argument("--to", required=True, choices=["compose", "kubernetes"], help="which place")
    manifests.add_argument("--out", required=True, type=Path, metavar="DIR", help="the folder to write to")
    for reader in (train, check, manifests):
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
        steering = command(name, help)
        steering.add_argument("run", metavar="RUN", help=_RUN_HELP)
        steering.add_argument("--tls", type=Path, metavar="DIR", help=_TLS_HELP)
    command(
        "export",
        "write a checkpoint as a plain Hugging Face model directory: rolecall export CHECKPOINT DIR; see rolecall "
        "export --help",
    )
    command(
        "score",
        "score a file of responses by a run's reward, to try it before training: rolecall score FILE --config CONFIG; "
        "see rolecall score --help",
    )
    health = command(
        "health",
        "ask a role for its gRPC health, for probes: exit code 0 when it can do its job, 1 when it cannot or does not "
        "answer within 2 s",
        _OVERRIDES,
    )
    health.add_argument("role", metavar="ROLE|ADDRESS", help=f"{', '.join(ROLES)}; or the host:port of one")
    health.add_argument(
        "run", nargs="?", type=Path, metavar="RUN", help="for a ROLE: its run directory or configuration file"
    )
    health.add_argument("--name", metavar="INSTANCE", help="which reference, as of rolecall serve")
    health.add_argument("--tls", type=Path, metavar="DIR", help=_TLS_HELP)
    health.add_argument("--live", action="store_true", help="whether the process answers, whatever it can do")
    ledger = command(
        "ledger",
        "print and check what became of every group of a run, live or after a crash; exit code 1 when it does not "
        "balance",
    )
    ledger.add_argument("run", metavar="RUN", help="a run directory or a configuration file")
    ledger.add_argument("--id", metavar="ID", help="tell the history of one group (12) or trajectory (12/3) instead")
    ledger.add_argument("--json", action="store_true", help="for programs")
    _add_conformance(
        command("conformance", "hold a RewardService that anybody wrote to its contract; exit code 1 when it breaks it")
    )
    users = command(
        "store-acl",
        "make users for an external store: an ACL file for the server, and a file with its URL for each role",
        _OVERRIDES,
    )
    users.add_argument("config", type=Path, metavar="CONFIG", help="the run's YAML file, with store.url")
    users.add_argument("directory", type=Path, metavar="DIR", help="where the files are written")
    users.add_argument("--once", action="store_true", help="do nothing where they were made before")
    certificates = command(
        "certificates",
        "make an authority for a run and a certificate for each role and person, for development and Compose",
    )
    certificates.add_argument("directory", type=Path, metavar="DIR", help="where DIR/<role>/tls.crt and so on go")
    certificates.add_argument("--run", required=True, metavar="NAME", help="run.name, which the certificates hold")
    certificates.add_argument(
        "--host", action="append", default=[], metavar="ROLE=NAME", help="a further host name or address of a role"
    )
    certificates.add_argument("--days", type=float, default=90.0, help="validity of the certificates (default: 90)")
    certificates.add_argument(
        "--renew", action="store_true", help="make new certificates from the authority in DIR, where there is one"
    )
    certificates.add_argument("--spiffe-id", metavar="TEMPLATE", help="rpc.spiffe_id of the run, where it is set")
    commands.choices["status"].add_argument("--json", action="store_true", help="for programs")
    commands.choices["stop"].add_argument("--checkpoint", action="store_true", help="save a checkpoint before ending")
    return parser, commands.choices


def _add_conformance(kit: argparse.ArgumentParser) -> None:
    kit.add_argument("address", metavar="ADDRESS", help="host:port, unix:/path or a gRPC target")
    kit.add_argument("--ca-file", metavar="FILE|system", help="call over TLS, and trust these roots")
    kit.add_argument(
        "--tls", type=Path, metavar="DIR", help="the folder of tls.crt, tls.key and ca.crt, for mutual TLS"
    )
    kit.add_argument("--bearer-token-file", type=Path, metavar="FILE", help="send this token; over TLS alone")
    kit.add_argument("--items", type=Path, metavar="FILE", help="score these, one JSON object a line (docs/scorers.md)")
    kit.add_argument("--timeout", type=float, default=10.0, metavar="S", help="deadline of a call (default: 10)")
    kit.add_argument(
        "--tolerance",
        type=float,
        default=1e-6,
        metavar="X",
        help="scores this far apart are the same, relative to the larger of 1 and the score (default: 1e-6)",
    )
    kit.add_argument(
        "--load-seconds", type=float, default=1.0, metavar="S", help="of load, at 1, 8 and 64 calls each (default: 1)"
    )
    kit.add_argument("--drain", type=int, metavar="PID", help="end this process, the server, to see how it ends")
    kit.add_argument("--json", action="store_true", help="for programs")
    kit.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit's XML, too")


def _refuse_unknown(parser: argparse.ArgumentParser, words: Sequence[str], commands: Collection[str]) -> None:
    """Says which command or role a word that is none was meant to be."""
    known = [("command", commands)] + ([("role", ROLES)] if words[:1] == ["serve"] else [])
    for (what, names), word in zip(known, words, strict=False):
        if word not in names and not word.startswith("-"):
            parser.error(f"there is no {what} {word!r}{did_you_mean(word, names)}; there are {', '.join(names)}")


def _run(arguments: argparse.Namespace, rest: list[str]) -> int:
    from rolecall.config_file import overrides_from

    if arguments.command == "health":
        from rolecall.commands.health import health

        return health(arguments, ROLES, overrides_from(rest, ("--live", "--name", "--tls")))
    from rolecall.settings import load_settings

    if arguments.command in ("train", "check"):
        settings = load_settings(arguments.config, overrides_from(rest, ("--recipe", "--resume")), arguments.recipe)
        if arguments.command == "check":
            from rolecall.commands.check import check

            return check(settings, sys.stdout)
        from rolecall.commands.check import require
        from rolecall.launcher.supervisor import train

        require(settings, sys.stdout)
        return train(settings, resume=arguments.resume)
    if arguments.command == "store-acl":
        from rolecall.commands.store_acl import store_acl

        settings = load_settings(arguments.config, overrides_from(rest, ("--once",)))
        return store_acl(settings, arguments.directory, sys.stdout, once=arguments.once)
    if arguments.command == "manifests":
        from rolecall.commands.manifests import manifests

        return manifests(arguments, overrides_from(rest, ("--out", "--recipe", "--to")), sys.stdout)
    if arguments.command == "sft":
        from rolecall.settings import load_sft_settings

        sft_settings = load_sft_settings(arguments.config, overrides_from(rest, ("--resume",)))
        from rolecall.commands.sft import sft as fine_tune

        return fine_tune(sft_settings, resume=arguments.resume)
    if rest:
        from rolecall.errors import ConfigError

        raise ConfigError(f"unexpected argument {rest[0]!r}; see rolecall {arguments.command} --help")
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
    if arguments.command == "ledger":
        from rolecall.commands.ledger import ledger

        return ledger(arguments.run, arguments.id, arguments.json, sys.stdout)
    from rolecall.commands.steer import steer

    if arguments.command == "status":
        return steer("status", arguments.run, tls=arguments.tls, as_json=arguments.json)
    checkpoint = arguments.command == "stop" and arguments.checkpoint
    return steer(arguments.command, arguments.run, tls=arguments.tls, checkpoint=checkpoint)


def _become(module: str, rest: list[str]) -> int:
    """Becomes another process. -P: a `services` folder where the user stands must not shadow ours."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *rest])
