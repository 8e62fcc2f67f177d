"""Rules of episodes that the environment's own agent runs: each is run once, asks the policy that it was given, and
ends when that is refused.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from rolecall.conformance.check import Verdict, failed, passed
from rolecall.conformance.environment.call import Call
from rolecall.conformance.environment.contract import CONTRACT, PLACES
from rolecall.conformance.environment.describing import MOST_SESSIONS, filled
from rolecall.conformance.environment.leases import too_long
from rolecall.conformance.environment.policy import Script
from rolecall.conformance.environment.session import OVER, EnvironmentSession, Episode, same, short

OK = grpc.StatusCode.OK
NOT_OFFERED = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED)
RUNS = (*PLACES, "run.asks")
"""Rules without which nothing can be said of a run."""
NUM_AT_ONCE = 3
"""Times that a run is asked for at once."""
LONGEST_LOOK_S = 1.0
"""Seconds after which a call that is to be refused at once has had its time."""
ARRIVES_S = 0.1
"""Seconds in which a Close arrives, so that it finds the run under way."""
LOOK_S = 0.02
"""Seconds between two looks whether an agent has asked."""


@CONTRACT.rule("run.asks", "EnvironmentService.RunEpisode", "It is asked at least once.", PLACES)
async def asks(session: EnvironmentSession) -> Verdict:
    """Runs every row."""
    runs = await session.runs()
    for run in runs:
        if run.script.num_answered == 0:
            return failed(f"{run.row.name}: the agent ended without an answer of the policy")
    return passed(f"{len(runs)} episodes of up to {max(run.script.num_answered for run in runs)} calls")


@CONTRACT.rule(
    "run.instead",
    "EnvironmentService.RunEpisode",
    "It stands in place of Step where Describe says runs_episodes; the one that is not offered is FAILED_PRECONDITION "
    "or UNIMPLEMENTED.",
    PLACES,
)
async def instead(session: EnvironmentSession) -> Verdict:
    """Makes the call that is not offered."""
    async with session.episode(session.rows.played[0]) as episode:
        await episode.reset()
        runs = session.spec.runs_episodes
        what, call = ("Step", episode.step(1, "hello")) if runs else ("RunEpisode", episode.run_nowhere())
        code = await call.status()
    return passed(f"{what}: {code.name}") if code in NOT_OFFERED else failed(f"{what} ended with {code.name}")


@CONTRACT.rule("run.state", "RunEpisodeResponse.state", "EPISODE_STATE_TERMINATED or EPISODE_STATE_TRUNCATED.", RUNS)
async def state(session: EnvironmentSession) -> Verdict:
    """Looks for runs that do not say that they are over."""
    runs = await session.runs()
    for run in runs:
        if run.answer.state not in OVER:
            return failed(f"{run.row.name}: the state {run.answer.state}")
    return passed(f"{len(runs)} runs")


@CONTRACT.rule(
    "run.reward",
    "RunEpisodeResponse.reward",
    "The episode's reward, there where Describe names a range and only there.",
    RUNS,
)
async def reward(session: EnvironmentSession) -> Verdict:
    """Looks for runs without the reward that was declared, or with one that was not."""
    declares, runs = session.spec.HasField("reward"), await session.runs()
    for run in runs:
        if run.answer.HasField("reward") != declares:
            return failed(f"{run.row.name}: {'no reward, and it declares one' if declares else 'a reward, undeclared'}")
    return passed(f"{len(runs)} rewards" if declares else "none, as declared")


@CONTRACT.rule(
    "run.repeated",
    "EnvironmentService.RunEpisode",
    "Repeated, it gets the answer that was given, and nothing is done again.",
    RUNS,
)
async def repeated(session: EnvironmentSession) -> Verdict:
    """Runs an episode, and asks twice more."""
    async with _begun(session) as (episode, script):
        first = await episode.run(script)
        num_asked = script.num_asked
        for _ in range(2):
            again = await episode.run(script)
            if not same(first, again):
                return failed(f"a run was answered {short(first)}, repeated {short(again)}")
        if script.num_asked != num_asked:
            return failed(f"the policy was asked {script.num_asked - num_asked} times by repeated calls")
    return passed("thrice the same")


@CONTRACT.rule(
    "run.attached",
    "EnvironmentService.RunEpisode",
    "One that is still under way is waited for.",
    (*RUNS, "run.repeated"),
)
async def attached(session: EnvironmentSession) -> Verdict:
    """Asks for a run several times at once, and again while its agent waits for the policy."""
    (before, *_) = await session.runs()
    async with _begun(session, is_held=True) as (episode, script):
        calls = [episode.run(script) for _ in range(NUM_AT_ONCE)]
        await _asked(script, calls[0])
        calls.append(episode.run(script))
        await asyncio.sleep(LOOK_S)
        script.going.set()
        answers = await asyncio.gather(*calls)  # bounded: by the calls' deadline
        for answer in answers:
            if not same(answers[0], answer):
                return failed(f"a run was answered {short(answers[0])} and {short(answer)} at once")
        if session.spec.deterministic and script.num_asked != before.script.num_asked:
            return failed(f"the policy was asked {script.num_asked} times, and {before.script.num_asked} in one run")
    return passed(f"{len(answers)} times at once")


@CONTRACT.rule(
    "run.conflict",
    "EnvironmentService.RunEpisode",
    "With another request, FAILED_PRECONDITION (TURN_CONFLICT), and nothing is done.",
    RUNS,
)
async def conflict(session: EnvironmentSession) -> Verdict:
    """Asks for a run with another key, while one is under way and after it."""
    async with _begun(session, is_held=True) as (episode, script):
        running = episode.run(script)
        await _asked(script, running)
        for when in ("under way", "over"):
            other = session.script(episode.row)
            ending = asyncio.ensure_future(episode.run(other).status())
            await asyncio.wait({ending}, timeout=LONGEST_LOOK_S)  # one that waits for the run under way is broken
            script.going.set()
            code = await ending  # bounded: by the call's deadline
            if code is not grpc.StatusCode.FAILED_PRECONDITION or other.num_asked:
                return failed(
                    f"while a run was {when}, another ended with {code.name}, its key used {other.num_asked}x"
                )
            await running.status()
    return passed("FAILED_PRECONDITION, twice")


@CONTRACT.rule(
    "run.budget",
    "EnvironmentService.RunEpisode",
    "A budget that is spent is refused with 403: the agent ends by itself.",
    RUNS,
)
async def budget(session: EnvironmentSession) -> Verdict:
    """Runs episodes with fewer calls than their agent makes."""
    (before, *_) = await session.runs()
    for max_calls in {1, max(1, before.script.num_answered - 1)}:
        async with _begun(session, max_calls=max_calls) as (episode, script):
            problem = await _unended(
                session, episode.run(script), f"after {max_calls} calls the next was refused (403)"
            )
            if problem:
                return failed(problem)
    return passed("it ended")


@CONTRACT.rule(
    "run.failure",
    "EnvironmentService.RunEpisode",
    "What fails in the agent or at the endpoint is a status, never a reward.",
    RUNS,
)
async def failure(session: EnvironmentSession) -> Verdict:
    """Fails every call with 500, listens nowhere, and runs the rows that are marked fails."""
    async with _begun(session, status=500) as (episode, script):
        if await episode.run(script).status() is OK:
            return failed("every call of the policy failed (500), and the run was answered")
    async with _begun(session) as (episode, _):
        if await episode.run_nowhere().status() is OK:
            return failed("nobody listened at the endpoint, and the run was answered")
    for row in session.rows.fails:
        async with session.episode(row) as episode:
            await episode.reset().status()
            if await episode.run(session.script(row)).status() is OK:
                return failed(f"{row.name} was answered, and is marked fails")
    return passed(f"500, nobody there{f', {len(session.rows.fails)} rows' if session.rows.fails else ''}")


@CONTRACT.rule(
    "run.revoked",
    "EnvironmentService.RunEpisode",
    "Afterwards, also when the session is closed or the caller died, the endpoint refuses it (401) or does not answer: "
    "the agent ends.",
    RUNS,
)
async def revoked(session: EnvironmentSession) -> Verdict:
    """Takes the key away in the middle of a run."""
    async with _begun(session, is_held=True) as (episode, script):
        running = episode.run(script)
        await _asked(script, running)
        script.revoke()
        problem = await _unended(session, running, "the key was refused (401)")
    return failed(problem) if problem else passed("it ended")


@CONTRACT.rule(
    "run.closed",
    "EnvironmentService.RunEpisode",
    "Closed while it runs, a session keeps its place until then, and no longer.",
    (*RUNS, "run.revoked", "describe.sessions"),
)
async def closed(session: EnvironmentSession) -> Verdict:
    """Closes a session whose agent waits for the policy, takes the key away, and fills every place."""
    async with _begun(session, is_held=True) as (episode, script):
        running = episode.run(script)
        await _asked(script, running)
        running.cancel()
        closing = episode.close()
        await asyncio.sleep(ARRIVES_S)
        script.revoke()
        code = await closing.status()
        if code is not OK:
            return failed(f"the Close of a run whose key is refused ended with {code.name}")
        code = await episode.reset().status()
        if code is not grpc.StatusCode.NOT_FOUND:
            return failed(f"a Reset after the Close of a run ended with {code.name}")
    if not 0 < session.spec.max_sessions <= MOST_SESSIONS:
        return passed("NOT_FOUND; its places are not counted")
    problem = await filled(session)
    return failed(f"after the Close of a run, {problem}") if problem else passed("its place was free")


@CONTRACT.rule("run.lease", "EnvironmentService.RunEpisode", "It may take longer than lease_s.", RUNS)
async def lease(session: EnvironmentSession) -> Verdict:
    """Has an agent wait for the policy for two leases."""
    unseen = too_long(session)
    if unseen:
        return unseen
    wait_s = 2 * session.spec.lease_s
    async with _begun(session, is_held=True) as (episode, script):
        running = episode.run(script, longer_s=wait_s)
        await _asked(script, running)
        await asyncio.sleep(wait_s)
        script.going.set()
        code = await running.status()
    return passed(f"{wait_s:g} s") if code is OK else failed(f"a run of more than {wait_s:g} s ended with {code.name}")


@asynccontextmanager
async def _begun(
    session: EnvironmentSession, *, max_calls: int | None = None, status: int = 0, is_held: bool = False
) -> AsyncIterator[tuple[Episode, Script]]:
    """A session that Reset opened, and the policy for its run, which is revoked in the end."""
    row = session.rows.played[0]
    script = session.script(row, max_calls=max_calls, status=status, is_held=is_held)
    async with session.episode(row) as episode:
        await episode.reset()
        try:
            yield episode, script
        finally:
            script.revoke()


async def _asked(script: Script, running: Call) -> None:
    """Waits until the agent asks the policy, or its run ends."""
    while script.num_asked == 0 and not running.done():
        await asyncio.sleep(LOOK_S)


async def _unended(session: EnvironmentSession, running: Call, when: str) -> str | None:
    """Returns what is wrong with how a run ended whose policy was refused."""
    code = await running.status()
    if code is not grpc.StatusCode.DEADLINE_EXCEEDED:
        return None
    return f"{when}, and the run was not over {session.run_s + session.close_s:g} s after it began"
