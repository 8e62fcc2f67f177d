"""The checker of attested tokens sees each kind of forged trajectory, and nothing where all is well."""

from collections.abc import Callable

import numpy as np
import pytest

from rolecall.v1.trajectory_pb2 import Span, TrajectoryMeta
from tests.attestation import Trajectory, violations

ATTESTED = {1: "d1", 2: "d2"}


def trajectory(*spans: tuple[int, str, int, int]) -> Trajectory:
    """Two prompt tokens and four sampled ones; the columns agree with the spans."""
    versions = np.full(6, -1, np.int32)
    for version, _, start, end in spans:
        versions[start:end] = version
    meta = TrajectoryMeta(
        id="0/0",
        spans=[
            Span(policy_version=version, weights_digest=digest, start=start, end=end)
            for version, digest, start, end in spans
        ],
    )
    return Trajectory(meta, np.arange(6, dtype=np.int32), (versions >= 0).astype(np.uint8), versions)


def honest(meta: TrajectoryMeta, token_ids: object, index: int, digest: str) -> int:
    """Weights d1 and d2 sample the token that is the index."""
    return index


def test_tokens_of_attested_weights_pass() -> None:
    assert violations([trajectory((1, "d1", 2, 4), (2, "d2", 4, 6))], ATTESTED, honest) == []


@pytest.mark.parametrize(
    ("forged", "problem"),
    [
        (trajectory((3, "d3", 2, 6)), "was never attested"),
        (trajectory((1, "d2", 2, 6)), "version 1 has two digests"),
        (trajectory((1, "", 2, 6)), "was never attested"),
    ],
)
def test_a_version_that_was_never_attested_or_under_another_digest_is_found(forged: Trajectory, problem: str) -> None:
    assert any(problem in found for found in violations([forged], ATTESTED))


def test_one_version_under_two_digests_is_found_even_when_neither_is_known() -> None:
    found = violations([trajectory((7, "a", 2, 6)), trajectory((7, "b", 2, 6))], {})
    assert any("version 7 has two digests" in problem for problem in found)


@pytest.mark.parametrize(
    "forge",
    [
        lambda each: each.policy_versions.put(3, 2),
        lambda each: each.policy_versions.put(0, 1),
        lambda each: each.response_mask.put(5, 0),
    ],
    ids=["another version", "a prompt token", "an unmasked token"],
)
def test_columns_that_disagree_with_the_spans_are_found(forge: Callable[[Trajectory], None]) -> None:
    forged = trajectory((1, "d1", 2, 6))
    forge(forged)
    assert any("disagree" in problem for problem in violations([forged], ATTESTED))


def test_a_token_that_the_named_weights_would_not_have_sampled_is_found() -> None:
    forged = trajectory((1, "d1", 2, 6))
    forged.token_ids[4] = 99
    assert violations([forged], ATTESTED, honest) == ["0/0[2:6]: token 4 is 99; weights d1 sample 4"]
