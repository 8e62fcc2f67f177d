#!/usr/bin/env python3
"""Makes .venv from a lock: exactly what it lists (--no-deps), then RoleCall itself, editable.

Owns .venv and the stamp in it, which makes a second run a no-op until the lock, pyproject.toml or the Python changes,
and says which lock it was made from: that one stays where none is named. Uses the standard library alone. It is not a
resolver: requirements/*.txt are complete.
"""

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".rolecall-setup"
PYTHONS = ((3, 11), (3, 12))
LOCKS = ("cpu", "cuda")

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
    STAMP.write_text(f"{name} unfinished")
    if not (_install_torch(lock) and _install_lock(lock) and _install_ourselves()):
        return 1
    STAMP.write_text(wanted)
    print("setup: done", flush=True)
    return 0


def _fingerprint(lock: Path) -> str:
    parts = [lock.read_bytes(), (ROOT / "pyproject.toml").read_bytes(), sys.version.encode(), str(ROOT).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _pins(lock: Path) -> list[str]:
    return [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]


def _install_torch(lock: Path) -> bool:
    """First and by itself, because it alone may need another index, and so that its absence is told plainly."""
    pin = next(line for line in _pins(lock) if line.startswith("torch=="))
    index = os.environ.get("TORCH_INDEX")
    print(f"setup: {pin} (the largest piece)", flush=True)
    log = _pip(["--no-deps", *(["--extra-index-url", index] if index else []), pin], total=0)
    if log is None:
        return True
    if "No matching distribution found" in log and "+cpu" in pin:
        print(NO_CPU_TORCH.format(pin=pin), file=sys.stderr)
    else:
        print(log, file=sys.stderr)
    return False


def _install_lock(lock: Path) -> bool:
    log = _pip(["--no-deps", "--no-warn-conflicts", "--requirement", str(lock)], total=len(_pins(lock)))
    if log is not None:
        print(log, file=sys.stderr)
    return log is None


def _install_ourselves() -> bool:
    log = _pip(["--no-deps", "--no-build-isolation", "--editable", str(ROOT)], total=0)
    if log is not None:
        print(log, file=sys.stderr)
    return log is None


def _pip(arguments: list[str], total: int) -> str | None:
    """Runs `pip install`; None on success, else its output. Of `total` packages, shows how many are settled."""
    command = [
        str(VENV / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
        *arguments,
    ]
    terminal, lines, settled = sys.stdout.isatty(), [], 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if total and line.startswith("Installing collected packages"):
                print("\rsetup: unpacking".ljust(70) if terminal else "setup: unpacking", flush=True)
            elif total and line.startswith(("Collecting ", "Processing ", "Requirement already satisfied")):
                settled += 1
                if terminal:
                    print(
                        f"\rsetup: {settled}/{total} {line.split()[1] if line.startswith('Coll') else ''}".ljust(70)[
                            :70
                        ],
                        end="",
                        flush=True,
                    )
                elif settled % 50 == 0 or settled == total:
                    print(f"setup: {settled}/{total} packages", flush=True)
    return "".join(lines) if process.returncode else None


if __name__ == "__main__":
    sys.exit(main())
