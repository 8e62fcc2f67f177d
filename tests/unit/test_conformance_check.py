"""The order of a kit's checks, and how long one may take."""

import asyncio

from rolecall.conformance.check import Contract, Result, Status, Verdict, VerdictError, passed, run, skipped


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


async def test_each_result_is_told_before_the_next_rule_is_looked_at() -> None:
    contract: Contract[Session] = Contract("a.proto")
    told: list[Result] = []

    @contract.rule("first", "Service", "It comes first.")
    async def first(session: Session) -> Verdict:
        return passed(f"{len(told)} told")

    @contract.rule("second", "Service", "It comes second.")
    async def second(session: Session) -> Verdict:
        return passed(f"{len(told)} told")

    results = await run([first, second], Session(), told.append)
    assert [result.verdict.seen for result in results] == ["0 told", "1 told"]
    assert told == results


async def test_a_call_may_decide_the_check_that_makes_it() -> None:
    contract: Contract[Session] = Contract("a.proto")

    @contract.rule("unseen", "Service", "It cannot be seen.")
    async def unseen(session: Session) -> Verdict:
        raise VerdictError(skipped("its lease was over"))

    (result,) = await run([unseen], Session())
    assert result.verdict == skipped("its lease was over")
