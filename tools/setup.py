#!/usr/bin/env python3
"""Makes .venv from a lock: exactly what it lists (--no-deps), then RoleCall itself, editable.

Owns .venv and the stamp in it, which makes a second run a no-op until the lock, pyproject.toml or the Python changes,
and says which lock it was made from: that one stays where none is named. Uses the standard library alone. It is not a
resolver: requirements/*.txt are complete.

uv installs, in a tenth of pip's time, from the sources that pip is configured with. Where it cannot, pip does.
"""

import argparse
import ast
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".rolecall-setup"
PYTHONS = ((3, 11), (3, 12))
LOCKS = ("cpu", "cuda")
UNFINISHED = "unfinished"

NO_CPU_TORCH = """
setup: no CPU build of torch ({pin}) in the package sources that pip is configured with.
  The default source carries CUDA builds only. Name the index of CPU builds, which PyTorch's install page shows for
  "Linux, Pip, Python, CPU" (https://pytorch.org/get-started/locally/), and run it again:

      make setup TORCH_INDEX=<the URL after --index-url on that page>

  On a machine with NVIDIA GPUs use the CUDA lock instead: make setup LOCK=cuda
"""


def main() -> int:
    """0 when .venv is as the lock says; 1 with a remedy on stderr otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lock", choices=LOCKS, help="which of requirements/*.txt to install; .venv's own, or cpu")
    stamped = STAMP.read_text() if STAMP.is_file() else ""
    name = parser.parse_args().lock or next((name for name in LOCKS if stamped.startswith(f"{name} ")), "cpu")
    lock = ROOT / "requirements" / f"{name}.txt"
    if sys.version_info[:2] not in PYTHONS:
        print(
            f"setup: Python {sys.version.split()[0]} will not do; RoleCall needs 3.11 or 3.12: make setup "
            "PYTHON=/path/to/python3.12",
            file=sys.stderr,
        )
        return 1
    wanted = f"{name} {_fingerprint(lock)}"
    if stamped == wanted:
        return 0
    print(f"setup: {VENV.name} from {lock.relative_to(ROOT)} with Python {sys.version.split()[0]}", flush=True)
    if not (VENV / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    STAMP.write_text(f"{name} {UNFINISHED}")
    log = _install_lock(lock, anew=stamped.endswith(UNFINISHED))
    if log is None:
        log = _pip(["--no-deps", "--no-build-isolation", "--editable", str(ROOT)])
    if log is not None:
        print(log, file=sys.stderr)
        return 1
    STAMP.write_text(wanted)
    print("setup: done", flush=True)
    return 0


def _fingerprint(lock: Path) -> str:
    parts = [lock.read_bytes(), (ROOT / "pyproject.toml").read_bytes(), sys.version.encode(), str(ROOT).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _pins(lock: Path) -> list[str]:
    return [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]


def _install_lock(lock: Path, *, anew: bool) -> str | None:
    """None once all of the lock is installed, else why not. `anew`: a run before this one was cut short, of which uv
    would take a package that is there in part for whole.
    """
    pins = _pins(lock)
    print(f"setup: {len(pins)} packages", flush=True)
    log = _pip([next(pin for pin in pins if pin.startswith("uv=="))])
    if log is None:
        log = _uv([*(["--reinstall"] if anew else []), "--no-deps", "--requirement", str(lock)])
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    missing = re.compile(f"no (version of|matching distribution found for) {re.escape(torch)}", re.IGNORECASE)
    if log is not None and not missing.search(log):
        print(f"setup: pip goes on, which takes minutes, for uv failed: {log.strip()}", flush=True)
        index = os.environ.get("TORCH_INDEX")
        requirement = [*(["--extra-index-url", index] if index else []), "--requirement", str(lock)]
        log = _pip(["--no-deps", "--no-warn-conflicts", *requirement], total=len(pins))
    if log is not None and "+cpu" in torch and missing.search(log):
        return NO_CPU_TORCH.format(pin=torch)
    return log


def _uv(arguments: list[str]) -> str | None:
    """Runs `uv pip install` as pip would; None on success, else its output."""
    sources, environment = sources_of_pip(_settings_of_pip())
    # The best of all sources, as pip takes it: torch is in most of them, and its CPU build in one.
    command = [str(VENV / "bin" / "uv"), "pip", "install", "--python", str(VENV / "bin" / "python")]
    if sys.dont_write_bytecode:  # else Python writes it for what is imported; here each process would compile it anew
        command.append("--compile-bytecode")
    return _install(
        [*command, "--index-strategy", "unsafe-best-match", *sources, *arguments],
        settled=("Downloaded ",),
        announced="Downloading ",
        environment=environment,
    )


def _settings_of_pip() -> dict[str, str]:
    python = str(VENV / "bin" / "python")
    listed = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True).stdout
    return {key: ast.literal_eval(value) for key, _, value in (line.partition("=") for line in listed.splitlines())}


def sources_of_pip(settings: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Returns arguments and environment by which uv takes packages from where pip does, whose `settings` uv does not
    read. Indexes are in the environment: their addresses may hold passwords, and everybody sees arguments.
    """

    def get(name: str) -> str:
        keys = (f"{section}.{name}" for section in (":env:", "install", "global"))
        return next((settings[key] for key in keys if key in settings), "")

    arguments = [
        *(["--no-index"] if get("no-index").lower() in ("1", "on", "t", "true", "y", "yes") else []),
        *(f"--only-binary={names}" for names in get("only-binary").split()),
        *(f"--allow-insecure-host={host}" for host in get("trusted-host").split()),
    ]
    given = {
        "UV_DEFAULT_INDEX": get("index-url"),
        "UV_INDEX": " ".join(f"{get('extra-index-url')} {os.environ.get('TORCH_INDEX', '')}".split()),
        "UV_FIND_LINKS": ",".join(get("find-links").split()),
        "SSL_CERT_FILE": get("cert"),
    }
    return arguments, {name: value for name, value in given.items() if value}


def _pip(arguments: list[str], total: int = 0) -> str | None:
    """Runs `pip install`; None on success, else its output. Of `total` packages, shows how many are settled."""
    command = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    settled = ("Collecting ", "Processing ", "Requirement already satisfied")
    return _install([*command, "--progress-bar", "off", *arguments], settled=settled, total=total)


def _install(
    command: list[str],
    *,
    settled: tuple[str, ...],
    total: int = 0,
    announced: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> str | None:
    """Runs a command that installs; None on success, else its output. Shows how many packages are settled, by how its
    lines begin, of `total`, or on a terminal of those that it announces; nothing where there are none.
    """
    terminal, lines, num_settled = sys.stdout.isatty(), [], 0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment}
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            said = line.strip()
            if announced is not None and said.startswith(announced):
                total += 1
            elif total and said.startswith(settled):
                num_settled += 1
                if terminal:
                    print(f"\rsetup: {num_settled}/{total} {said}".ljust(70)[:70], end="", flush=True)
                elif announced is None and (num_settled % 50 == 0 or num_settled == total):
                    print(f"setup: {num_settled}/{total} packages", flush=True)
    if terminal and num_settled:
        print("\r".ljust(71), end="\r", flush=True)
    return "".join(lines) if process.returncode else None


if __name__ == "__main__":
    sys.exit(main())
