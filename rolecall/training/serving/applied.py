"""The record of what a trainer has applied: its step, the records of recent steps and what it published. Part of its
checkpoint, as JSON. No torch.

The state is a frozen value: the device thread replaces it after a step, the event loop reads it, and nobody sees half
of a change.
"""

import json
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Self, TypeVar

from google.protobuf import json_format

from rolecall.checkpoint.storage import Storage
from rolecall.errors import CheckpointMismatchError, CheckpointMissingError
from rolecall.v1.training_pb2 import TrainResult

V = TypeVar("V")

KEPT = 64
"""Records and publishes kept. A controller asks only for steps that the store has not committed, which trail the
trainer by one or two.
"""

FILE = "trainer.json"
TORN = -1
"""The step of a trainer that began to load a checkpoint and did not come to its end: a recovery loads it again."""


@dataclass(frozen=True)
class Applied:
    """An immutable record of what was applied; the methods return the next one."""

    step: int = 0
    """Steps applied; the next to apply."""
    policy_version: int = -1
    """Highest policy version published; -1 when none."""
    skipped: int = 0
    """Optimizer steps skipped for a gradient that was not finite."""
    records: MappingProxyType[int, TrainResult] = field(default_factory=lambda: MappingProxyType({}))
    """Results of the last KEPT steps."""
    published: MappingProxyType[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """policy_version -> step of the last KEPT publishes."""

    def after_step(self, result: TrainResult, skipped: int) -> Self:
        """Returns the record one step later."""
        return replace(
            self,
            step=result.step + 1,
            skipped=self.skipped + skipped,
            records=_newest({**self.records, result.step: result}),
        )

    def may_publish(self, policy_version: int) -> bool:
        """Whether the present weights may go out as `policy_version`: it is new, or the last one, and theirs."""
        is_theirs = self.published.get(policy_version) == self.step
        return policy_version > self.policy_version or (policy_version == self.policy_version and is_theirs)

    def after_publish(self, policy_version: int) -> Self:
        """Returns the record with the present step published as `policy_version`."""
        return replace(
            self, policy_version=policy_version, published=_newest({**self.published, policy_version: self.step})
        )

    def last_result(self) -> TrainResult | None:
        """Result of the last applied step; None before the first."""
        return self.records.get(self.step - 1)

    def to_json(self) -> bytes:
        """Contents of FILE."""
        tree = {
            "step": self.step,
            "policy_version": self.policy_version,
            "skipped": self.skipped,
            "records": [json_format.MessageToDict(record) for record in self.records.values()],
            "published": sorted(self.published.items()),
        }
        return json.dumps(tree).encode()

    @classmethod
    def read(cls, storage: Storage) -> Self:
        """Reads FILE in a trainer's share of a checkpoint. CheckpointMissingError, CheckpointMismatchError."""
        try:
            tree = json.loads(storage.read(FILE))
        except FileNotFoundError:
            raise CheckpointMissingError(
                f"{storage.url} holds no {FILE}; give a folder that SaveCheckpoint wrote"
            ) from None
        except ValueError as error:
            raise CheckpointMismatchError(
                f"{storage.url}/{FILE} is not a trainer's record ({error}); restore another checkpoint"
            ) from error
        records = [json_format.ParseDict(record, TrainResult()) for record in tree["records"]]
        return cls(
            step=tree["step"],
            policy_version=tree["policy_version"],
            skipped=tree["skipped"],
            records=_newest({record.step: record for record in records}),
            published=_newest(dict(tree["published"])),
        )


def _newest(items: dict[int, V]) -> MappingProxyType[int, V]:
    return MappingProxyType({key: items[key] for key in sorted(items)[-KEPT:]})
