"""A actor that does nothing."""

import sys

from tests.integration.fake_roles.role import main

if __name__ == "__main__":
    sys.exit(main("actor"))
