"""`python -m tests.hostile [--bodies 100000] [--seed 0]`: a long siege of every service, and its figures."""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from pydantic import SecretStr

from rolecall.settings import StoreSection
from rolecall.store.connection import connect
from rolecall.store.embedded import EmbeddedStore
from rolecall.store.ledger import Ledger
from rolecall.store.rows import Rows
from tests.conftest import smallest_settings
from tests.fixtures_store import StoreUnderTest
from tests.hostile.servers import all_services
from tests.hostile.siege import Findings, Siege


def main() -> int:
    """Exit code: 1 when something was not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--bodies", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedStore(Path(folder) / "store", "*", 2**31)
        section = StoreSection(url=SecretStr(server.start()))
        connection = connect(section)
        try:
            ledger = Ledger(connection, "siege")
            ledger.lock(0.2)
            store = StoreUnderTest(section, "siege", connection, ledger, Rows(connection, "siege", 2))
            found = asyncio.run(_siege(store, Path(folder), arguments.bodies, arguments.seed))
        finally:
            connection.close()
            server.stop()
    sys.stdout.write(f"{found.table()}\n")
    return int(bool(found.problems))


async def _siege(store: StoreUnderTest, folder: Path, num_bodies: int, seed: int) -> Findings:
    async with all_services(store, folder, smallest_settings(folder)) as served:
        return await Siege(served, seed).run(num_bodies, num_large=100, num_bombs=100)


if __name__ == "__main__":
    sys.exit(main())
