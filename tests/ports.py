"""Ports for servers that cannot choose one themselves."""

import random
import socket

FIRST, LAST = 15_000, 32_000
"""Below the kernel's ephemeral ports: one of those may be taken, by a server of another test or as the near end of any
connection, before it is bound.
"""


def free_port() -> int:
    """A port of this machine that nobody listens at now."""
    while True:
        port = random.randint(FIRST, LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
