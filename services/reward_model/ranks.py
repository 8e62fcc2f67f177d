"""The reward model on its ranks: the head's outputs at some tokens of sequences, by the trainers' engine on packed
microbatches. Knows tensors and no gRPC.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rolecall.errors import InvalidInputError
from rolecall.settings import ActorSection, ParallelSection, RewardModelSettings
from rolecall.training.engine import ValueOutputs
from rolecall.training.options import EngineOptions
from rolecall.training.packing.pack import pack, unpack
from rolecall.training.packing.plan import plan_batch
from rolecall.training.serving.hooks import ProcessHooks
from rolecall.training.step.rank_context import RankContext
from rolecall.training.step.start import start_context
from rolecall.v1 import command_pb2
from rolecall.v1.command_pb2 import TrainerCommand
from rolecall.wire import Array
from services.reward_model.conversations import Tokens


class ScoringRanks:
    """A frozen reward model over the ranks of a group. Methods block and are called by one thread; one that is called
    on rank 0 has the others, which `follow`, do the same.
    """

    def __init__(self, context: RankContext) -> None:
        self.context = context

    @property
    def world_size(self) -> int:
        """The number of its ranks."""
        return self.context.group.world_size

    @property
    def num_slots(self) -> int:
        """The groups of ranks that compute different sequences."""
        return self.context.group.num_slots

    def outputs_of(self, sequences: Sequence[Tokens]) -> list[Array]:
        """The head's outputs at the wanted tokens of each sequence, float32, in order."""
        sent = [
            command_pb2.TokenSequence(token_ids=each.ids_T.tobytes(), places=each.places.tobytes())
            for each in sequences
        ]
        with self.context.group.leading(TrainerCommand(score=command_pb2.ScoreTokensCommand(sequences=sent))):
            return self._outputs_of([each.ids_T for each in sequences], [each.places for each in sequences])

    def keep_alive(self) -> None:
        """Shows the other ranks that this one lives."""
        self.context.group.keep_alive()

    def stop(self) -> None:
        """Lets the other ranks go; the last call."""
        self.context.group.stop(over=True)

    def follow(self) -> None:
        """Does what rank 0 commands, until it stops the group."""
        with self.context.group.watched():
            for command in self.context.group.commands():
                if command.WhichOneof("work") != "score":
                    raise InvalidInputError(
                        f"command {command.WhichOneof('work')} is not this role's; ranks of different roles or "
                        "releases share a group"
                    )
                sent = command.score.sequences
                self._outputs_of(
                    [np.frombuffer(each.token_ids, "<i4") for each in sent],
                    [np.frombuffer(each.places, "<i4") for each in sent],
                )

    def _outputs_of(self, ids: Sequence[Array], places: Sequence[Array]) -> list[Array]:
        context, group = self.context, self.context.group
        plans = plan_batch(
            [len(ids_T) for ids_T in ids],
            num_minibatches=1,
            token_budget=context.token_budget,
            world_size=group.num_slots,
            cost=context.engine.flops.forward,
            seed=0,
        )
        rows = [{"token_ids": ids_T, "response_mask": np.ones(len(ids_T), np.uint8)} for ids_T in ids]
        packed = [
            pack([rows[index] for index in indices], [], temperature=1.0, device=context.device)
            for indices in plans[group.slot].microbatches
        ]
        heads = [
            heads_T
            for microbatch, outputs in zip(packed, context.engine.forward(packed), strict=True)
            for heads_T in _by_sequence(outputs, microbatch.lengths)
        ]
        own = [heads_T[places[index]] for index, heads_T in zip(plans[group.slot].rows, heads, strict=True)]
        mine = np.concatenate([np.zeros(0, np.float32), *own]).astype("<f4") if group.is_slot_leader else np.zeros(0)
        everyone = group.gather(mine.tobytes())
        in_order = np.frombuffer(b"".join(everyone), "<f4")
        computed = [index for plan in plans for index in plan.rows]
        ends = np.cumsum([len(places[index]) for index in computed])
        found = dict(zip(computed, np.split(in_order, ends[:-1]), strict=True))
        return [found[index] for index in range(len(ids))]


def _by_sequence(outputs: object, lengths: Sequence[int]) -> list[Array]:
    """The head's output at every token of each sequence: a value stands one token after the output that it is."""
    assert isinstance(outputs, ValueOutputs)
    last_S = outputs.bootstrap_values_S.detach().to("cpu").numpy().astype(np.float32)
    values = unpack(outputs.values_N, lengths)
    return [np.append(values_T[1:], last) for values_T, last in zip(values, last_S, strict=True)]


def build(settings: RewardModelSettings, folder: Path, hooks: ProcessHooks) -> ScoringRanks:
    """Starts the reward model on this rank, its model loaded; a collective. ConfigError. What memory was used for is
    written to `folder` should it run out.
    """
    options = EngineOptions(
        path=settings.path,
        head="value",
        dtype=settings.dtype,
        optimizer=None,
        parallel=ParallelSection(**settings.parallel.model_dump()),
        max_sequence_tokens=settings.max_tokens,
    )
    actor = ActorSection(num_threads=settings.num_threads)
    return ScoringRanks(start_context(options, settings, actor, folder, settings.start_timeout_s, hooks))
