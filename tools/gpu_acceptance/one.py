"""The process of one check: `python -m tools.gpu_acceptance.one MODULE:FUNCTION FINDINGS.json FOLDER [--dry]`. Its
last line says why it did not end well."""

import argparse
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from tools.gpu_acceptance.findings import Findings, SkippedCheckError

FAILED, SKIPPED = 1, 77
"""Exit codes: an exception, whose sentence is the last line; the reason for skipping is."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("findings", type=Path)
    parser.add_argument("folder", type=Path, help="for what it needs on a disk")
    parser.add_argument("--dry", action="store_true")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    module, _, function = arguments.target.partition(":")
    found = Findings(arguments.findings, arguments.dry)
    try:
        getattr(importlib.import_module(module), function)(found, arguments.folder)
    except SkippedCheckError as skipped:
        print(skipped)
        return SKIPPED
    except Exception as error:  # an edge: whatever a check dies of is its finding
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}".splitlines()[0])
        return FAILED
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Threads of collectives, ended by the interpreter's teardown, now and then abort the process after all is done.
    os._exit(code)
