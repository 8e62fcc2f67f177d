"""Liars whose turns or sessions break a rule of `proto/rolecall/v1/environment.proto`: each one of them, and keeps all
others.
"""

import asyncio
import time
from typing import Any

from rolecall.errors import FencedError, RoleCallError, SessionLostError, TurnConflictError
from tests.contract.environment_honest import (
    LEASE_S,
    WORK_S,
    Answer,
    CloseCall,
    Closed,
    Honest,
    Kept,
    OlderCall,
    Opening,
    ResetCall,
    State,
    StepCall,
    T,
    message,
)
from tests.contract.liars import Liars

LIARS = Liars(Honest)


@LIARS.being("step.order")
class FromZero(Honest):
    """The first turn is 0."""

    def is_due(self, kept: Kept, request: StepCall) -> bool:
        return request.turn == len(kept.said)


@LIARS.being("step.order")
class Lexical(Honest):
    """Turns are compared as the strings that they are read as."""

    def most_turns(self, kept: Kept) -> int:
        return 12

    def is_due(self, kept: Kept, request: StepCall) -> bool:
        return super().is_due(kept, request) and str(request.turn) > str(kept.turn)


@LIARS.being("step.repeated")
class Shifted(Honest):
    """Every repeated Step is answered by the one before."""

    async def Step(self, request: StepCall, context: Any) -> Answer:
        kept = self.open.get(request.session)
        before = kept.answering if kept is not None and kept.turn == request.turn else None
        answer = await super().Step(request, context)
        if before is not None and before.done():
            return Answer(messages=[message("tool", "an older answer")], state=answer.state, reward=answer.reward)
        return answer


@LIARS.being("step.repeated")
class Twice(Honest):
    """A repeated Step gets its answer, and the episode advances again."""

    async def Step(self, request: StepCall, context: Any) -> Answer:
        kept = self.open.get(request.session)
        if kept is not None and kept.answering is not None and self.is_repeated(kept, request):
            kept.said.append(request.action.text)
        return await super().Step(request, context)


@LIARS.being("step.repeated")
class Forgetful(Honest):
    """A repeated Step is a conflict."""

    def is_repeated(self, kept: Kept, request: StepCall) -> bool:
        assert kept.answering is not None
        return super().is_repeated(kept, request) and not kept.answering.done()


@LIARS.being("step.attached", work_s=WORK_S)
class Busy(Honest):
    """A Step that is under way refuses a repeated one."""

    def is_repeated(self, kept: Kept, request: StepCall) -> bool:
        assert kept.answering is not None
        return super().is_repeated(kept, request) and kept.answering.done()

    def is_due(self, kept: Kept, request: StepCall) -> bool:
        return (kept.answering is None or kept.answering.done()) and super().is_due(kept, request)


@LIARS.being("step.conflict")
class Obliging(Honest):
    """The last turn with another action gets the recorded answer."""

    def is_repeated(self, kept: Kept, request: StepCall) -> bool:
        return request.turn == kept.turn


@LIARS.being("step.conflict")
class Skipping(Honest):
    """Turns may be left out."""

    def is_due(self, kept: Kept, request: StepCall) -> bool:
        return request.turn > kept.turn and kept.turn < self.most_turns(kept)


@LIARS.being("step.conflict")
class Tireless(Honest):
    """An episode that is over takes another turn."""

    def is_due(self, kept: Kept, request: StepCall) -> bool:
        return request.turn == kept.turn + 1


@LIARS.being("action.text")
class Literal(Honest):
    """Nothing said is a failure."""

    async def take(self, kept: Kept, request: StepCall) -> Answer:
        if not request.action.text.strip():
            raise RoleCallError("expected a number")
        return await super().take(kept, request)


@LIARS.being("reset.repeated")
class Anew(Honest):
    """A repeated Reset begins anew."""

    async def Reset(self, request: ResetCall, context: Any) -> Opening:
        kept = self.open.get(request.session)
        if kept is not None and kept.turn:
            kept.turn, kept.said, kept.answering = 0, [], None
        return await super().Reset(request, context)


@LIARS.being("reset.repeated")
class Curt(Honest):
    """A repeated Reset is a conflict."""

    async def Reset(self, request: ResetCall, context: Any) -> Opening:
        if request.session in self.open:
            raise TurnConflictError("it is open already")
        return await super().Reset(request, context)


@LIARS.being("calls.abandoned", work_s=WORK_S)
class Dependent(Honest):
    """The work ends with its caller, and the turn counts as taken."""

    async def calling(self, kept: Kept, work: "asyncio.Future[T]") -> T:
        if work is kept.opening:
            return await super().calling(kept, work)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if work.cancelled():
                raise RoleCallError("the turn's first caller has left") from None
            work.cancel()
            raise


@LIARS.being("session.apart")
class Shared(Honest):
    """What is said in one session stands in all of its task."""

    def __init__(self) -> None:
        super().__init__()
        self.last: list[str] = []

    async def boot(self, request: ResetCall) -> Opening:
        self.last = []
        return await super().boot(request)

    async def take(self, kept: Kept, request: StepCall) -> Answer:
        if not kept.said and len(self.open) > 1:
            kept.said = self.last
        return await super().take(kept, request)


@LIARS.being("session.apart")
class Narrow(Honest):
    """It remembers the answer that it gave last; a turn of another session, repeated, is taken again."""

    last = ""

    async def Step(self, request: StepCall, context: Any) -> Answer:
        kept = self.open.get(request.session)
        if kept is not None and self.last != request.session and self.is_repeated(kept, request):
            kept.turn -= 1
            kept.answering = None
        self.last = request.session
        return await super().Step(request, context)


@LIARS.being("session.name")
class Attempted(Honest):
    """Every attempt at an episode is the same session."""

    async def Reset(self, request: ResetCall, context: Any) -> Opening:
        request.session = without_claim(request.session)
        return await super().Reset(request, context)

    async def Step(self, request: StepCall, context: Any) -> Answer:
        request.session = without_claim(request.session)
        return await super().Step(request, context)

    async def Close(self, request: CloseCall, context: Any) -> Closed:
        request.session = without_claim(request.session)
        return await super().Close(request, context)


def without_claim(name: str) -> str:
    """Returns a session's name up to its index in the group."""
    return name.rpartition("/")[0]


@LIARS.being("session.unknown")
class Welcoming(Honest):
    """A turn of a session that it does not know is a conflict."""

    async def Step(self, request: StepCall, context: Any) -> Answer:
        if request.session not in self.open:
            raise TurnConflictError("Reset comes first")
        return await super().Step(request, context)


@LIARS.being("reset.closed")
class Reopening(Honest):
    """A closed session is opened again."""

    def check_closed(self, request: ResetCall) -> None:
        self.closed.pop(request.session, None)


@LIARS.being("reset.closed")
class Surprised(Honest):
    """A Reset that comes after the Close of a session it did not know opens it."""

    def check_closed(self, request: ResetCall) -> None:
        if self.closed.get(request.session) is not None:
            raise SessionLostError("it was closed")


@LIARS.being("reset.fenced")
class Unfenced(Honest):
    """Older claims may open sessions."""

    def check_fence(self, request: ResetCall) -> None:
        pass


@LIARS.being("reset.fenced")
class HalfFenced(Honest):
    """Only CloseOlder's fences count."""

    def check_fence(self, request: ResetCall) -> None:
        if request.fence < self.fences.get(request.group, 0):
            raise FencedError("a newer claim was here")


@LIARS.being("reset.fenced")
class LexicallyFenced(Honest):
    """Fences are compared as the strings that they are read as."""

    def check_fence(self, request: ResetCall) -> None:
        if str(request.fence) < str(self.fences.get(request.group, 0)):
            raise FencedError("a newer claim was here")
        self.fences[request.group] = request.fence


@LIARS.being("reset.task")
class Hopeful(Honest):
    """A task that cannot be begun is a failure like any other."""

    async def Reset(self, request: ResetCall, context: Any) -> Opening:
        if request.task.ground_truth == "never":
            raise RoleCallError("not now")
        return await super().Reset(request, context)


@LIARS.being("older.closed")
class Deaf(Honest):
    """CloseOlder closes nothing."""

    def is_older(self, kept: Kept, request: OlderCall) -> bool:
        return False


@LIARS.being("older.closed")
class LexicallyDeaf(Honest):
    """Fences are compared as the strings that they are read as."""

    def is_older(self, kept: Kept, request: OlderCall) -> bool:
        return kept.request.group == request.group and str(kept.request.fence) < str(request.fence)


@LIARS.being("older.others")
class Sweeping(Honest):
    """CloseOlder closes the fence's own sessions, too."""

    def is_older(self, kept: Kept, request: OlderCall) -> bool:
        return kept.request.group == request.group and kept.request.fence <= request.fence


@LIARS.being("older.others")
class Reckless(Honest):
    """CloseOlder closes sessions of every group."""

    def is_older(self, kept: Kept, request: OlderCall) -> bool:
        return kept.request.fence < request.fence


@LIARS.being("close.repeated")
class Regrading(Honest):
    """A repeated Close grades again."""

    def close_again(self, request: CloseCall) -> Closed:
        closed = super().close_again(request)
        if request.grade:
            closed.reward.value /= 2
        return closed


@LIARS.being("close.unknown")
class Strict(Honest):
    """Only what is known can be closed."""

    def close_again(self, request: CloseCall) -> Closed:
        if request.session not in self.closed:
            self.closed[request.session] = None
            raise SessionLostError("there is no such session")
        return super().close_again(request)


@LIARS.being("close.unknown")
class Lenient(Honest):
    """A session that is not known has a grade of nothing."""

    def close_again(self, request: CloseCall) -> Closed:
        return self.closed.setdefault(request.session, None) or Closed()


@LIARS.being("failure.status")
class Polite(Honest):
    """A failure is told to the policy."""

    def fail(self, kept: Kept) -> Answer:
        return Answer(messages=[message("tool", "an error occurred")], state=State.EPISODE_STATE_CONTINUES)


@LIARS.being("failure.status")
class Grading(Honest):
    """A failed episode is worth 0."""

    def grade(self, kept: Kept, closed: Closed) -> None:
        closed.reward.CopyFrom(self.reward(kept))


@LIARS.being("failure.final")
class Recovering(Honest):
    """After a failure the next turn is taken."""

    def fail(self, kept: Kept) -> Answer:
        kept.failed = False
        raise RoleCallError("the simulator is gone")

    def grade(self, kept: Kept, closed: Closed) -> None:
        if "fail" in kept.said:
            raise RoleCallError("the episode has failed")
        super().grade(kept, closed)


@LIARS.being("step.order", lease_s=0.5)
class Reaping(Honest):
    """A session is closed for its lease while a turn is under way, and every turn takes longer."""

    async def take(self, kept: Kept, request: StepCall) -> Answer:
        await asyncio.sleep(self.spec.lease_s)
        self.open.pop(kept.request.session, None)
        self.closed[kept.request.session] = Closed()
        raise SessionLostError("its lease is over")


@LIARS.being("session.lease", lease_s=LEASE_S)
class Hasty(Honest):
    """A repeated call renews no lease."""

    async def calling(self, kept: Kept, work: "asyncio.Future[T]") -> T:
        return await asyncio.shield(work)


@LIARS.being("step.kept", lease_s=LEASE_S)
class Forgetting(Honest):
    """It remembers an answer for less than half a lease; then the turn is taken again."""

    async def Step(self, request: StepCall, context: Any) -> Answer:
        kept = self.open.get(request.session)
        is_old = kept is not None and time.monotonic() - kept.touched_at > 0.45 * LEASE_S
        if kept is not None and is_old and self.is_repeated(kept, request):
            kept.turn -= 1
            kept.answering = None
        return await super().Step(request, context)


@LIARS.being("session.reaped", lease_s=LEASE_S)
class Hoarding(Honest):
    """Sessions are kept until they are closed."""

    async def reap(self) -> None:
        await asyncio.Event().wait()
