"""The words of the command line: every command of `rolecall` with its arguments, in the order of `rolecall --help`.

What a command does stands in cli.py and in the module of its name.
"""

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

ROLES = ("controller", "actor", "critic", "reference", "reward", "rollout")
SERVED = (*ROLES, "model-server", "reward-model")
"""What `rolecall serve` starts: the roles of a run, a server that its judges ask, and a scorer with a file of its own.
"""

_OVERRIDES = "Any key of the file can be overridden: --section.key value (read as YAML), e.g. --run.num_steps 3."
_TLS_HELP = "for an address: the folder of tls.crt, tls.key and ca.crt"
_RUN_HELP = "a run directory, its configuration file, or the controller's host:port"


class AddCommand(Protocol):
    """A function that adds a command and returns its parser, for its arguments."""

    def __call__(self, name: str, help: str, epilog: str | None = None) -> argparse.ArgumentParser: ...


def command_line() -> tuple[argparse.ArgumentParser, Collection[str]]:
    """Returns the parser, and the names of the commands."""
    parser = argparse.ArgumentParser(
        prog="rolecall",
        description="RL post-training for language models in which every role is a service.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help: str, epilog: str | None = None) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=help, description=help, epilog=epilog, allow_abbrev=False)

    _add_starting(command)
    _add_steering(command)
    _add_processes(command)
    _add_health(command)
    _add_ledger(command)
    _add_rewind(command)
    _add_conformance(command)
    _add_credentials(command)
    return parser, commands.choices


def _add_starting(command: AddCommand) -> None:
    """Adds what reads a run's file and starts it, in part or whole, here or elsewhere."""
    train = command("train", "start every local role of a run, show its progress, and end them all with it", _OVERRIDES)
    train.add_argument("config", type=Path, metavar="CONFIG", help="the run's YAML file")
    train.add_argument("--resume", action="store_true", help="go on with the run in run.dir")
    check = command(
        "check", "validate a configuration without starting anything, and print what follows from it", _OVERRIDES
    )
    check.add_argument("config", type=Path, metavar="CONFIG", help="the YAML file of a run, or of sft")
    settings = command("settings", "show the keys of a configuration file: what each takes, its default, its meaning")
    settings.add_argument(
        "key", nargs="?", metavar="KEY", help="a section or a key, e.g. actor.optimizer or warmup_steps; all sections"
    )
    settings.add_argument(
        "--of", choices=["run", "sft", "reward-model"], default="run", help="which kind of file (default: run)"
    )
    manifests = command("manifests", "write what deploys a run in containers or by Slurm, from its file", _OVERRIDES)
    manifests.add_argument(
        "config", type=Path, metavar="CONFIG", help="the run's YAML file, with paths as its roles see them there"
    )
    manifests.add_argument("--to", required=True, choices=["compose", "kubernetes", "slurm"], help="which place")
    manifests.add_argument("--out", required=True, type=Path, metavar="DIR", help="the folder to write to")
    evaluate = command(
        "evaluate", "sample and score the held-out sets of a run with a model, without training", _OVERRIDES
    )
    evaluate.add_argument("model", type=Path, metavar="MODEL", help="a Hugging Face model directory")
    evaluate.add_argument("--config", type=Path, required=True, metavar="CONFIG", help="the run's YAML file")
    evaluate.add_argument("--out", type=Path, metavar="DIR", help="keep samples, metrics and logs in this new folder")
    evaluate.add_argument("--json", action="store_true", help="for programs")
    for reader in (train, check, manifests, evaluate):
        reader.add_argument(
            "--recipe",
            metavar="NAME|FILE",
            help="a method's keys (a name of rolecall/recipes/, or a file), for what CONFIG does not set",
        )
    sft = command("sft", "fine-tune a model on examples (prompts with responses), for a run to start from", _OVERRIDES)
    sft.add_argument("config", type=Path, metavar="CONFIG", help="the YAML file (rolecall/settings/sft.py)")
    sft.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in run.dir")
    serve = command("serve", "run one role: rolecall serve ROLE CONFIG [--name INSTANCE]", _OVERRIDES)
    serve.add_argument("role", choices=SERVED, metavar="ROLE", help=", ".join(SERVED))


def _add_steering(command: AddCommand) -> None:
    """Adds what a run's controller is asked."""
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
        if name == "status":
            steering.add_argument("--json", action="store_true", help="for programs")
        if name == "stop":
            steering.add_argument("--checkpoint", action="store_true", help="save a checkpoint before ending")
    profile = command("profile", "have a worker of a live run record its next steps, and print where the traces are")
    profile.add_argument("run", metavar="RUN", help=_RUN_HELP)
    profile.add_argument(
        "--role", required=True, metavar="WORKER", help="actor, critic, or a rollout by its name, as rollout-0"
    )
    steps = "steps to record: of a trainer, 1 to 10 (default: 1), or of a rollout's engine, 1 to 100 (default: 20)"
    profile.add_argument("--steps", type=int, metavar="N", help=steps)
    profile.add_argument("--tls", type=Path, metavar="DIR", help=_TLS_HELP)


def _add_processes(command: AddCommand) -> None:
    """Adds the commands that are processes of their own, with parsers of their own."""
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


def _add_health(command: AddCommand) -> None:
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


def _add_ledger(command: AddCommand) -> None:
    ledger = command(
        "ledger",
        "print and check what became of every group of a run, live or after a crash; exit code 1 when it does not "
        "balance",
    )
    ledger.add_argument("run", metavar="RUN", help="a run directory or a configuration file")
    ledger.add_argument("--id", metavar="ID", help="tell the history of one group (12) or trajectory (12/3) instead")
    ledger.add_argument("--json", action="store_true", help="for programs")


def _add_rewind(command: AddCommand) -> None:
    rewind = command(
        "rewind",
        "make an older checkpoint of a stopped run the newest, for train --resume to go on from; those after it are "
        "deleted",
    )
    rewind.add_argument("run", metavar="RUN", help="a run directory or a configuration file; also of rolecall sft")
    rewind.add_argument(
        "step", type=int, metavar="STEP", help="the step of a checkpoint; of the newest to drop what was trained since"
    )


def _add_conformance(command: AddCommand) -> None:
    """Adds what a service that anybody wrote is made from, and what calls it."""
    kit = command(
        "conformance",
        "hold a RewardService or EnvironmentService that anybody wrote to its contract; exit code 1 when it breaks it",
    )
    tasks = command("tasks", "print the tasks that an environment lists, as a data set: rolecall tasks ADDRESS > FILE")
    tasks.add_argument("--split", metavar="NAME", help="which ones, where it has several splits")
    for caller in (kit, tasks):
        caller.add_argument("address", metavar="ADDRESS", help="host:port, unix:/path or a gRPC target")
        caller.add_argument("--ca-file", metavar="FILE|system", help="call over TLS, and trust these roots")
        caller.add_argument("--bearer-token-file", type=Path, metavar="FILE", help="send this token; over TLS alone")
    kit.add_argument(
        "--tls", type=Path, metavar="DIR", help="the folder of tls.crt, tls.key and ca.crt, for mutual TLS"
    )
    kit.add_argument(
        "--items",
        type=Path,
        metavar="FILE",
        help="score these (docs/scorers.md), or play these (docs/check_yours.md), one JSON object a line",
    )
    kit.add_argument(
        "--timeout",
        type=float,
        default=10.0,
        metavar="S",
        help="deadline of a call, and of an episode that an agent runs (default: 10)",
    )
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
    files = command("protos", "write the contracts of scorers and environments, .proto files to make stubs from")
    files.add_argument("directory", type=Path, metavar="DIR", help="where rolecall/v1/*.proto go, as protoc -I DIR")


def _add_credentials(command: AddCommand) -> None:
    """Adds what makes users and certificates."""
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
        "make an authority for a run and a certificate for each role and person, for development, Compose and Slurm",
    )
    certificates.add_argument("directory", type=Path, metavar="DIR", help="where DIR/<role>/tls.crt and so on go")
    certificates.add_argument("--run", required=True, metavar="NAME", help="run.name, which the certificates hold")
    certificates.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="ROLE=NAME",
        help="a further host name or address of a role; of environment or store, a certificate for that",
    )
    certificates.add_argument("--days", type=float, default=90.0, help="validity of the certificates (default: 90)")
    certificates.add_argument(
        "--renew", action="store_true", help="make new certificates from the authority in DIR, where there is one"
    )
    certificates.add_argument("--spiffe-id", metavar="TEMPLATE", help="rpc.spiffe_id of the run, where it is set")
