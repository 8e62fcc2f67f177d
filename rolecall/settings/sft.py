"""The file of `rolecall sft`: supervised fine-tuning of the model that a run then starts from. Sections
that a run has, too, are the same.
"""

from typing import Literal, Self

from pydantic import PositiveInt, PrivateAttr, model_validator

from rolecall.settings.data import JobSection, ModelSection, check_system_prompt
from rolecall.settings.plugin import PluginSection
from rolecall.settings.section import ConfigPath, DataFiles, NonNegativeInt, Section
from rolecall.settings.services import TelemetrySection, TrackersSection
from rolecall.settings.sizes.derived import DerivedSize, derive_sft_sizes
from rolecall.settings.trainers import ActorSection, check_dtype


class SftRunSection(JobSection):
    """The fine-tuning: its name, its directory and its length."""

    num_steps: PositiveInt | None = None
    """Optimizer steps; this or num_epochs."""
    num_epochs: PositiveInt | None = None
    """Passes over the examples; this or num_steps."""


class SftDataSection(Section):
    """Examples: JSONL or parquet, one a row, which is a prompt and its response, or a conversation. The loss is on the
    response, or on every turn of the assistant, and on the token that ends it.
    """

    train: DataFiles
    """File of training examples, or a list of several, which are one set in this order."""
    preprocess: PluginSection | None = None
    """A function of your own that makes rows into the fields below. It is called with the fields of each row, held-out
    ones too, and returns those that are read, or None to leave the row out; always the same for the same row.
    """
    prompt_field: str = "prompt"
    """Field with the prompt: a string (one user message) or a list of {role, content}. Without a response it is a
    conversation, messages in OpenAI's form of which the last is the assistant's; the row's `tools` are shown in it.
    """
    response_field: str = "response"
    """Field with the response: a string, or a list of one {role: assistant, content}."""
    images_field: str | None = None
    """Field with the images that a row shows, in their order: a list of paths, or of {bytes, path} as parquet files
    hold them. A message of anyone but the assistant of a conversation shows one where its text says `<image>` or its
    content is a list with {type: image}; responses are text. For models of text and images, whose vision tower is then
    trained, too. Absent: examples are text.
    """
    system_prompt: str | None = None
    """A system message put before every prompt that has none."""
    max_tokens: PositiveInt = 2048
    """Longest prompt + response, the end included, or segment of a conversation; longer examples are refused and
    counted, never truncated. Images count with the tokens that the model makes of them.
    """
    batch_size: PositiveInt
    """Examples in one optimizer step; an epoch's last step takes those that are left."""
    shuffle: bool = True
    """Another deterministic order in every epoch; false keeps the file's order."""

    @model_validator(mode="after")
    def _system_prompt_shows_none(self) -> Self:
        check_system_prompt(self.system_prompt, self.images_field)
        return self


class SftEvaluationSection(Section):
    """Loss on held-out examples: at the start, every k steps and at the end."""

    path: ConfigPath
    """File of examples, same fields as the training data."""
    every_steps: NonNegativeInt = 0
    """Steps between evaluations; 0 evaluates only at the start and at the end."""


class SftSettings(Section):
    """The settings of `rolecall sft`: its whole file."""

    run: SftRunSection
    model: ModelSection
    data: SftDataSection
    evaluation: SftEvaluationSection | None = None
    aggregation: Literal["token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean"] = "token_mean"
    """How the losses of a step's tokens become one number, normalised (token_sum: not) by the whole step's own counts.
    """
    actor: ActorSection = ActorSection()
    """The trainer, as in the run that follows; what it says of calls (addresses and deadlines) means nothing here."""
    telemetry: TelemetrySection = TelemetrySection()
    trackers: TrackersSection = TrackersSection()

    _derived_sizes: tuple[DerivedSize, ...] = PrivateAttr(())

    @property
    def derived_sizes(self) -> tuple[DerivedSize, ...]:
        """Sizes that the file leaves out and that are not the defaults of their sections: derived from the rest."""
        return self._derived_sizes

    @property
    def shows_images(self) -> bool:
        """Whether examples may show images."""
        return self.data.images_field is not None

    @property
    def freezes_vision_tower(self) -> bool:
        """Whether a vision tower stays as it is: it learns nothing where no images are shown."""
        return self.model.freeze_vision_tower or not self.shows_images

    @property
    def trained_image_share(self) -> float:
        """Most of an example's tokens that may be of images, of which a trained vision tower keeps what its backward
        pass takes, as a share.
        """
        return 0.0 if self.freezes_vision_tower else 1.0

    def check_schedule(self, num_steps: int) -> None:
        """ValueError where warm-up and decay take more steps than the fine-tuning has."""
        optimizer = self.actor.optimizer
        num_changing = optimizer.warmup_steps + (optimizer.decay_steps or 0)
        if optimizer.decay_steps and num_changing > num_steps:
            raise ValueError(
                f"actor.optimizer.warmup_steps + decay_steps = {num_changing} exceed the {num_steps} optimizer steps; "
                "shorten them"
            )

    @model_validator(mode="after")
    def _longest_example_fits(self) -> Self:
        """Sets what sizes the file leaves out."""
        actor, self._derived_sizes = derive_sft_sizes(
            self.actor, self.model, self.data.max_tokens, self.trained_image_share
        )
        vars(self)["actor"] = actor  # not by attribute: to everybody else the file is frozen
        check_dtype(self.actor, self.model.dtype)
        if self.actor.token_budget < self.data.max_tokens:
            raise ValueError(
                f"actor.token_budget {self.actor.token_budget} is less than data.max_tokens {self.data.max_tokens}; "
                "raise it, or lower that"
            )
        if self.actor.router_replay != "off":
            raise ValueError("actor.router_replay: examples have no routing to replay; leave it off")
        if self.actor.address is not None:
            raise ValueError("actor.address: rolecall sft calls no service and runs its ranks here; remove it")
        if self.run.num_steps is not None:  # else it is checked once the examples are counted
            self.check_schedule(self.run.num_steps)
        return self
