"""The state of the weights that an engine holds, and whether anything sampled from them may leave the process.

A pure state machine: no engine, no waiting. The replica asks it before every step and tells it of every change.
"""

from collections.abc import Iterable
from enum import Enum

from rolecall.errors import AsleepError, NotAttestedError, StaleVersionError, TornWeightsError, WrongVersionError

MAX_KNOWN_VERSIONS = 1024
"""Attested versions remembered; a kept response that spans older ones is discarded."""


class State(Enum):
    """The life of an engine's weights. Names are those of the contract's WeightsState.

        EMPTY ──receive──▶ LOADING ──whole──▶ LOADED ──Resume(version, digest)──▶ ATTESTED
                              │  ▲               │                                    │
                            error└───receive─────┴────────────receive─────────────────┘
                              ▼  └───receive───┐
                             TORN ─────────────┘
        any but LOADING ──Sleep──▶ ASLEEP ──WakeUp──▶ what was before it, after level 2 TORN

    Invariants, each asserted in tests/contract/test_rollout_state.py:
    - serving implies ATTESTED; every other state closes the gate.
    - (policy_version, digest) name whole weights in LOADED and ATTESTED only; elsewhere they are (-1, "").
    - ASLEEP is left by WakeUp only: memory is unmapped, so that loading and resuming would be an illegal access.
    - LOADING is left only for LOADED or TORN, or for what was before it when the load failed before it changed
      anything; TORN is left only by a full load.
    - policy_version never goes back, not even over a torn load: a version once begun is spent.

    Example: EMPTY, receive(3) LOADING, whole LOADED(3, d3), Resume(3, d3) ATTESTED and serving; receive(4) LOADING, a
    bucket is late: TORN; Resume(3, d3) is refused (TORN_WEIGHTS); receive(5) LOADING, LOADED(5, d5), Resume(5, d5):
    serving, and 4 never was.
    """

    EMPTY = 1
    LOADING = 2
    LOADED = 3
    ATTESTED = 4
    TORN = 5
    ASLEEP = 6


class HeldWeights:
    """State, version and digest of an engine's weights, and the versions that were ever attested to it."""

    def __init__(self) -> None:
        self.state = State.EMPTY
        self.policy_version = -1
        """Version held whole; -1 when none is."""
        self.digest = ""
        """Digest of the weights of `policy_version`."""
        self.sleep_level = 0
        """Level of the sleep; 0 while awake."""
        self._newest_begun = -1
        self._before = (State.EMPTY, -1, "")
        self._attested: dict[int, str] = {}

    def check_newer(self, policy_version: int) -> None:
        """StaleVersionError unless `policy_version` is higher than any version begun before."""
        if policy_version <= self._newest_begun:
            raise StaleVersionError(
                f"version {policy_version} is not newer than {self._newest_begun}, which this engine has begun before"
            )

    def begin(self, policy_version: int) -> None:
        """A load of `policy_version` starts: LOADING. AsleepError, StaleVersionError."""
        self.check_awake()
        self.check_newer(policy_version)
        self._newest_begun = policy_version
        self._before = (self.state, self.policy_version, self.digest)
        self.state, self.policy_version, self.digest = State.LOADING, -1, ""

    def untouched(self) -> None:
        """The load in progress failed before it changed anything: back to what was held before it. The version stays
        spent.
        """
        if self.state is State.LOADING:
            self.state, self.policy_version, self.digest = self._before

    def loaded(self, digest: str) -> None:
        """The load in progress is whole: LOADED."""
        if self.state is not State.LOADING:
            raise TornWeightsError(f"no load is in progress ({self.state.name})")
        self.state, self.policy_version, self.digest = State.LOADED, self._newest_begun, digest

    def check_whole(self) -> None:
        """TornWeightsError while a load is in progress or after one that did not finish; AsleepError."""
        self.check_awake()
        if self.state in (State.TORN, State.LOADING):
            raise TornWeightsError(
                f"the engine's weights are {self.state.name}; publish a full version before resuming",
                state=self.state.name,
            )

    def check_awake(self) -> None:
        """Raises AsleepError from Sleep to WakeUp."""
        if self.state is State.ASLEEP:
            raise AsleepError(f"the engine was put to sleep at level {self.sleep_level}; wake it up first")

    def fall_asleep(self, level: int) -> None:
        """Memory is about to be given back: ASLEEP. Level 2 drops the weights. AsleepError, TornWeightsError in a
        load.
        """
        self.check_awake()
        if self.state is State.LOADING:
            raise TornWeightsError("a load is in progress; it ends before the engine can sleep", state=self.state.name)
        self._before = (self.state, self.policy_version, self.digest) if level == 1 else (State.TORN, -1, "")
        self.state, self.policy_version, self.digest, self.sleep_level = State.ASLEEP, -1, "", level

    def wake(self) -> None:
        """The memory is back: what was held before, or TORN."""
        if self.state is State.ASLEEP:
            self.state, self.policy_version, self.digest = self._before
            self.sleep_level = 0

    def torn(self) -> None:
        """The weights are not whole any more: TORN."""
        self.state, self.policy_version, self.digest = State.TORN, -1, ""

    def attest(self, policy_version: int, digest: str) -> None:
        """The store holds (policy_version, digest) as attested: ATTESTED, when that is what is held. AsleepError,
        TornWeightsError, WrongVersionError.
        """
        self.check_whole()
        if (policy_version, digest) != (self.policy_version, self.digest) or self.state is State.EMPTY:
            raise WrongVersionError(
                f"the engine holds version {self.policy_version} ({self.digest[:12]}), not {policy_version} "
                f"({digest[:12]})"
            )
        self.state = State.ATTESTED
        self._attested[policy_version] = digest
        if len(self._attested) > MAX_KNOWN_VERSIONS:
            del self._attested[min(self._attested)]

    def require_attested(self, policy_version: int | None = None) -> None:
        """NotAttestedError unless the weights are attested, WrongVersionError unless they are `policy_version` when one
        is given.
        """
        if self.state is not State.ATTESTED:
            raise NotAttestedError(
                f"the engine's weights are {self.state.name}, not attested; ask again after the next publish",
                state=self.state.name,
            )
        if policy_version is not None and policy_version != self.policy_version:
            raise WrongVersionError(f"the engine holds version {self.policy_version}, not {policy_version}")

    def digests(self, policy_versions: Iterable[int]) -> dict[int, str]:
        """Digest of each version. NotAttestedError when one of them was never attested here: what it sampled must not
        leave.
        """
        versions = sorted(set(policy_versions))
        missing = [version for version in versions if version not in self._attested]
        if missing:
            raise NotAttestedError(
                f"versions {missing} were never attested to this engine; what they sampled is discarded"
            )
        return {version: self._attested[version] for version in versions}
