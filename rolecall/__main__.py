"""`python -m rolecall`: the `rolecall` command, from a checkout as well as from an installation."""

import sys

from rolecall.commands.cli import main

sys.exit(main())
