"""The order of a kit's checks, and how long one may take."""

import asyncio

from rolecall.conformance.check import Contract, Status, Verdict, passed, run


class LaterLoop(asyncio.SelectorEventLoop):
    """A loop whose clock a test sets forward."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


class Session:
    """A service that answers."""

    failed: set[str] = set()

    async def is_there(self) -> bool:
        return True


def test_a_check_of_a_slow_service_takes_as_long_as_its_calls_do() -> None:
    contract: Contract[Session] = Contract("a.proto")
    loop = LaterLoop()

    @contract.rule("slow", "Service", "It may be slow.")
    async def slow(session: Session) -> Verdict:
        loop.skipped_s += 7200.0
        await asyncio.sleep(0.01)  # a deadline would end it here
        return passed()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        (result,) = runner.run(run([slow], Session()))
    assert result.verdict.status is Status.PASSED
