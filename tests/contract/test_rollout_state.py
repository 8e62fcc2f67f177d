"""The state machine of an engine's weights: every transition, and the invariants in its docstring."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rolecall.errors import (
    AsleepError,
    NotAttestedError,
    RoleCallError,
    StaleVersionError,
    TornWeightsError,
    WrongVersionError,
)
from services.rollout.state import MAX_KNOWN_VERSIONS, HeldWeights, State


def loaded(version: int, digest: str) -> HeldWeights:
    held = HeldWeights()
    held.begin(version)
    held.loaded(digest)
    return held


def test_weights_are_served_only_after_resume_names_what_is_held() -> None:
    held = loaded(3, "d3")
    with pytest.raises(NotAttestedError):
        held.require_attested()
    for version, digest in [(2, "d3"), (3, "d2")]:
        with pytest.raises(WrongVersionError):
            held.attest(version, digest)
    held.attest(3, "d3")
    held.require_attested(3)
    with pytest.raises(WrongVersionError):
        held.require_attested(2)


def test_a_torn_engine_never_resumes_until_a_full_load() -> None:
    held = loaded(3, "d3")
    held.attest(3, "d3")
    held.begin(4)
    held.torn()
    with pytest.raises(TornWeightsError):
        held.attest(3, "d3")
    with pytest.raises(StaleVersionError):
        held.begin(4)
    held.begin(5)
    held.loaded("d5")
    held.attest(5, "d5")
    assert (held.policy_version, held.digest) == (5, "d5")


def test_a_load_that_changed_nothing_leaves_what_was_held() -> None:
    held = loaded(3, "d3")
    held.attest(3, "d3")
    held.begin(4)
    held.untouched()
    assert (held.state, held.policy_version, held.digest) == (State.ATTESTED, 3, "d3")
    with pytest.raises(StaleVersionError):
        held.begin(4)


def test_tokens_of_a_version_that_was_never_attested_may_not_leave() -> None:
    held = loaded(3, "d3")
    held.attest(3, "d3")
    held.begin(4)
    held.loaded("d4")
    with pytest.raises(NotAttestedError):
        held.digests([3, 4])
    held.begin(5)
    held.loaded("d5")
    held.attest(5, "d5")
    assert held.digests([3, 5, 5]) == {3: "d3", 5: "d5"}
    with pytest.raises(NotAttestedError):
        held.digests([3, 4, 5])


@pytest.mark.parametrize(("level", "after"), [(1, State.ATTESTED), (2, State.TORN)])
def test_sleep_keeps_what_is_held_or_drops_it_and_nothing_happens_before_it_wakes(level: int, after: State) -> None:
    held = loaded(3, "d3")
    held.attest(3, "d3")
    held.fall_asleep(level)
    with pytest.raises(AsleepError):
        held.attest(3, "d3")
    with pytest.raises(AsleepError):
        held.begin(4)
    with pytest.raises(AsleepError):
        held.fall_asleep(level)
    with pytest.raises(NotAttestedError):
        held.require_attested()
    held.wake()
    assert (held.state, held.sleep_level) == (after, 0)
    held.begin(4)  # a version that was refused in its sleep is not spent
    with pytest.raises(TornWeightsError):
        held.fall_asleep(1)


def test_an_empty_engine_cannot_be_resumed_by_naming_nothing() -> None:
    with pytest.raises(WrongVersionError):
        HeldWeights().attest(-1, "")


def test_only_so_many_versions_are_remembered() -> None:
    held = HeldWeights()
    for version in range(MAX_KNOWN_VERSIONS + 1):
        held.begin(version)
        held.loaded("d")
        held.attest(version, "d")
    assert held.digests([1, MAX_KNOWN_VERSIONS])
    with pytest.raises(NotAttestedError):
        held.digests([0])


class Life(RuleBasedStateMachine):
    """Any order of events, also senseless ones: the invariants hold."""

    def __init__(self) -> None:
        super().__init__()
        self.held = HeldWeights()
        self.begun: list[int] = []
        self.whole: dict[int, str] = {}
        self.resumed: set[int] = set()

    def attempt(self, event: str, *arguments: object) -> bool:
        try:
            getattr(self.held, event)(*arguments)
        except RoleCallError:
            return False
        return True

    @rule(version=st.integers(0, 12))
    def begin(self, version: int) -> None:
        if self.attempt("begin", version):
            assert not self.begun or version > self.begun[-1]
            self.begun.append(version)

    @precondition(lambda self: self.held.state is State.LOADING)
    @rule()
    def load(self) -> None:
        self.held.loaded(f"d{self.begun[-1]}")
        self.whole[self.begun[-1]] = f"d{self.begun[-1]}"

    @precondition(lambda self: self.held.state is not State.ASLEEP)
    @rule()
    def tear(self) -> None:
        self.held.torn()

    @rule()
    def leave_untouched(self) -> None:
        self.held.untouched()

    @rule(level=st.integers(1, 2))
    def sleep(self, level: int) -> None:
        before = self.held.state
        assert self.attempt("fall_asleep", level) == (before not in (State.LOADING, State.ASLEEP))

    @rule()
    def wake(self) -> None:
        before, level = self.held.state, self.held.sleep_level
        self.held.wake()
        assert self.held.state is not State.ASLEEP
        assert before is not State.ASLEEP or level == 1 or self.held.state is State.TORN

    @rule(version=st.integers(-1, 12))
    def resume(self, version: int) -> None:
        if self.attempt("attest", version, self.whole.get(version, "")):
            assert version in self.whole
            self.resumed.add(version)

    @invariant()
    def only_attested_weights_are_served(self) -> None:
        assert self.attempt("require_attested") == (self.held.state is State.ATTESTED)
        if self.held.state is State.ATTESTED:
            assert self.held.policy_version in self.resumed

    @invariant()
    def a_version_is_named_only_while_it_is_whole(self) -> None:
        named = self.held.state in (State.LOADED, State.ATTESTED)
        assert (self.held.policy_version >= 0) == named
        assert bool(self.held.digest) == named

    @invariant()
    def nothing_is_loaded_or_resumed_asleep(self) -> None:
        if self.held.state is State.ASLEEP:
            for event, *arguments in (("begin", 99), ("attest", -1, "")):
                assert not self.attempt(str(event), *arguments)

    @invariant()
    def only_attested_versions_may_leave(self) -> None:
        for version in range(13):
            assert self.attempt("digests", [version]) == (version in self.resumed)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
