"""Shows a run's trackers that it failed: `python -m rolecall.trackers CONFIG [--sft]`, in the place of a process that
ended before it could.

`rolecall train` and `rolecall sft` start it, which import no tracker's library themselves.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rolecall.settings import load_settings, load_sft_settings
from rolecall.trackers import show_failure


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--sft", action="store_true")
    arguments = parser.parse_args(argv)
    show_failure((load_sft_settings if arguments.sft else load_settings)(arguments.config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
