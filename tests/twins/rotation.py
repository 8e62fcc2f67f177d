"""The rotation of a run's certificates, keys and roots while it goes on."""

import asyncio
from datetime import timedelta
from pathlib import Path

from rolecall.commands.certificates import Authority
from rolecall.rpc.callers import Caller
from rolecall.settings import TlsSection

_DAY = timedelta(days=1)


class Rotation:
    """The certificates of a run, of an authority that is replaced by overlap: roots first, then who signs, then the old
    root goes.
    """

    def __init__(self, folder: Path, run: str = "test") -> None:
        self._folder, self._run = folder, run
        self._roots = [Authority.made("0")]
        self.count = 0
        self._write()

    def tls(self, role: str) -> TlsSection:
        own = self._folder / role
        return TlsSection(certificate_file=own / "tls.crt", key_file=own / "tls.key", ca_file=own / "ca.crt")

    async def turn(self) -> None:
        """One rotation of everything, roots included; each of its steps reaches everybody before the next."""
        self.count += 1
        new = Authority.made(str(self.count))
        old, self._roots = self._roots[-1], [*self._roots[-1:], new]
        self._write(signed_by=old)  # both are trusted, before anybody shows the new one's
        await asyncio.sleep(0.05)
        self._write(signed_by=new)
        await asyncio.sleep(0.05)
        self._roots = [new]
        self._write()

    def _write(self, signed_by: Authority | None = None) -> None:
        for role in Caller:
            uri = f"spiffe://rolecall/rolecall/{self._run}/{role}"
            (signed_by or self._roots[-1]).issue(
                self._folder / role, [uri], ["localhost", "127.0.0.1"], _DAY, roots=self._roots
            )
