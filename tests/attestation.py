"""Whether any sampled token comes from weights that nobody attested: judged from what was committed and what the store
holds as attested, by nothing else.

Independent of the code it checks: it asks no engine, no replica and no controller. With an oracle, who knows what
weights of a digest would have sampled, it also sees an engine that lies about the weights it used.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rolecall.store.connection import Connection
from rolecall.store.ledger import Ledger
from rolecall.store.rows import Rows
from rolecall.trajectory import rows_of
from rolecall.v1.trajectory_pb2 import TrajectoryMeta
from rolecall.wire import Array

COLUMNS = ("token_ids", "response_mask", "policy_versions")

Oracle = Callable[[TrajectoryMeta, Sequence[int], int, str], int]
"""(trajectory, its token ids, index, digest) -> the token that weights of that digest sample there."""


@dataclass(frozen=True)
class Trajectory:
    """One committed trajectory."""

    meta: TrajectoryMeta
    token_ids: Array
    response_mask: Array
    policy_versions: Array


def read_attested(connection: Connection, run: str) -> dict[int, str]:
    """Digest by version, of every version that was ever attested."""
    versions = connection.command("HGETALL", f"{{rl:{run}}}:versions")
    return {int(version): value.decode().split(" ")[1] for version, value in versions.items()}


def read_trajectories(ledger: Ledger, rows: Rows) -> list[Trajectory]:
    """All that is committed and not freed."""
    refs = [ref for _, group in ledger.read_committed("0", 10_000, 0.0) for ref in rows_of(group)]
    return [
        Trajectory(meta, *(row[name] for name in COLUMNS))
        for meta, row in zip(rows.read_meta(refs), rows.read(refs, list(COLUMNS)), strict=True)
    ]


def violations(
    trajectories: Iterable[Trajectory], attested: Mapping[int, str], oracle: Oracle | None = None
) -> list[str]:
    """What is wrong, in words; empty when every sampled token is of attested weights, and each version of one
    digest.
    """
    found: list[str] = []
    digests: dict[int, str] = dict(attested)
    for trajectory in trajectories:
        covered = [-1] * len(trajectory.token_ids)
        for span in trajectory.meta.spans:
            name = f"{trajectory.meta.id}[{span.start}:{span.end}]"
            if digests.setdefault(span.policy_version, span.weights_digest) != span.weights_digest:
                found.append(
                    f"{name}: version {span.policy_version} has two digests, {digests[span.policy_version][:8]} and "
                    f"{span.weights_digest[:8]}"
                )
            if attested.get(span.policy_version) != span.weights_digest:
                found.append(f"{name}: version {span.policy_version} ({span.weights_digest[:8]}) was never attested")
            for index in range(span.start, span.end):
                covered[index] = span.policy_version
                if oracle is not None and (
                    token := oracle(trajectory.meta, trajectory.token_ids.tolist(), index, span.weights_digest)
                ) != (sampled := int(trajectory.token_ids[index])):
                    found.append(
                        f"{name}: token {index} is {sampled}; weights {span.weights_digest[:8]} sample {token}"
                    )
        if covered != trajectory.policy_versions.tolist():
            found.append(f"{trajectory.meta.id}: spans and policy_versions disagree")
        if [version >= 0 for version in covered] != [bool(sampled) for sampled in trajectory.response_mask.tolist()]:
            found.append(f"{trajectory.meta.id}: spans and response_mask disagree")
    return found
