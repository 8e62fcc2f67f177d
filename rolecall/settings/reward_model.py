"""The file of `rolecall serve reward-model`: a model that scores responses, for any trainer. Sections that a run has,
too, are the same.
"""

from typing import Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from rolecall.settings.section import Address, ConfigPath, Section
from rolecall.settings.services import RpcSection, TelemetrySection
from rolecall.settings.sizes.loading import loading_s, model_bytes
from rolecall.settings.trainers import TrainerSection


class ProcessSection(Section):
    """Scores of a response's steps (a process reward model) in place of one of the whole."""

    separator: str
    """The token that is put after every step, at which the model scores it; one token of the model's vocabulary that
    its chat template does not use, e.g. <extra_0>.
    """
    split: str = "\n\n"
    """Text between the steps of a response."""
    reduce: Literal["min", "mean", "last"] = "min"
    """The reward that the steps' scores make."""
    token_rewards: bool = False
    """Whether each step's score is given as the reward of the step's last token, besides the reward."""
    policy: ConfigPath | None = None
    """Directory with the tokenizer of the model that wrote the responses, whose tokens token_rewards are of; absent:
    the reward model's own.
    """


class RewardModelSettings(TrainerSection):
    """The settings of `rolecall serve reward-model`: its whole file."""

    name: str = "reward-model"
    """Name in the scorer's description, in logs and in metrics."""
    path: ConfigPath
    """Hugging Face model directory: a sequence or token classification model of one label, or of two (wrong and right);
    or a critic's. Its tokenizer has a chat template.
    """
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type that it is computed in; its head in float32."""
    bind: Address | None = "127.0.0.1:50071"
    """`host:port` it listens on."""
    max_tokens: PositiveInt | None = None
    """Longest conversation with its response; a longer one is an error of the item, never cut. Absent: the model's own
    bound.
    """
    output: Literal["logit", "probability"] = "logit"
    """The score: what the head gives, or its sigmoid, which lies between 0 and 1."""
    reference: str | None = None
    """Text that is put after the last message of the user, for a model that compares with a reference answer:
    `{ground_truth}` in it stands for that answer, without which an item is an error. Absent: it sees no answer.
    """
    process: ProcessSection | None = None
    """Scores of steps; absent: one score of the whole, at the last token."""
    num_threads: PositiveInt | None = None
    """Threads per rank on CPUs; absent: the machine's cores over the ranks."""
    start_timeout_s: PositiveFloat = 300.0
    """Deadline for the model to be loaded; unless set, longer on GPUs and for larger models."""
    bearer_token_file: ConfigPath | None = None
    """File with a token that callers must send; absent: anybody may call."""
    rpc: RpcSection = RpcSection()
    telemetry: TelemetrySection = TelemetrySection()

    @model_validator(mode="after")
    def _is_a_service_of_its_own(self) -> Self:
        if self.address is not None:
            raise ValueError("address: it says where it listens with bind; callers name that in their own files")
        if self.parallel.pipeline > 1 or self.parallel.expert > 1:
            raise ValueError("parallel: pipeline and expert are a trainer's over Megatron-Core; leave them at 1")
        if self.reference is not None and "{ground_truth}" not in self.reference:
            raise ValueError("reference holds no {ground_truth}, where the reference answer goes; add it")
        if self.process is not None and not (self.process.separator and self.process.split):
            raise ValueError("process.separator and process.split must not be empty")
        return self

    @model_validator(mode="after")
    def _start_is_derived(self) -> Self:
        if "start_timeout_s" not in self.model_fields_set:
            # not by attribute: to everybody else the file is frozen
            vars(self).update(start_timeout_s=loading_s(model_bytes(self.path), on_gpus=bool(self.devices)))
        return self
