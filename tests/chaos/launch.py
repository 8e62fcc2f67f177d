"""`rolecall train` over the roles of a package, as a process: python -m tests.chaos.launch CONFIG [PACKAGE]."""

import sys
from pathlib import Path

from rolecall.launcher.supervisor import train
from rolecall.settings import load_settings

if __name__ == "__main__":
    config = Path(sys.argv[1])
    package = sys.argv[2] if len(sys.argv) > 2 else "tests.chaos.roles"
    sys.exit(train(load_settings(config), resume=False, package=package))
