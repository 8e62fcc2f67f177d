"""`rolecall train` over the fake roles: `python -m tests.integration.fake_roles CONFIG`."""

import sys
from pathlib import Path

from rolecall.launcher.supervisor import train
from rolecall.settings import load_settings

if __name__ == "__main__":
    config = Path(sys.argv[1])
    sys.exit(train(load_settings(config), resume=False, package="tests.integration.fake_roles"))
