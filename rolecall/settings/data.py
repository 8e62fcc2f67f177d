"""Sections of what is trained on what: the run, the model, prompts, sampling and held-out evaluation."""

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, JsonValue, PositiveInt, model_validator

from rolecall.errors import ConfigError
from rolecall.settings.plugin import PluginSection
from rolecall.settings.section import (
    CheckpointUrl,
    ConfigPath,
    DataFiles,
    Named,
    NonNegativeInt,
    Section,
    UnitFloat,
    spelled,
)

Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
"""Types that models compute in."""

TEMPERATURES = (0.01, 2.0)
"""The least and the greatest that vLLM samples at: below it takes the least without a word, so that the trainers would
divide by another; above it refuses.
"""

IMAGE_MARK = "<image>"
"""Stands in a message's text where it shows an image."""
MAX_RESPONSES = 1024
"""Most responses to one prompt that a rollout samples."""
NumResponses: TypeAlias = Annotated[int, Field(ge=1, le=MAX_RESPONSES)]
"""Number of responses to one prompt."""


def is_sampled_at(temperature: float) -> bool:
    """Whether vLLM samples at `temperature`, which may have come as a float32."""
    least, most = TEMPERATURES
    return least * (1 - 1e-6) <= temperature <= most


def check_system_prompt(system_prompt: str | None, images_field: str | None) -> None:
    """ValueError where the system prompt of a section says what stands for an image of a row."""
    if images_field is not None and IMAGE_MARK in (system_prompt or ""):
        raise ValueError(
            f"system_prompt: it says {IMAGE_MARK}, which stands for an image of a row where data.images_field is set; "
            "say it in other words"
        )


def _greedy_or_sampled(temperature: float) -> float:
    if temperature != 0 and not is_sampled_at(temperature):
        raise ValueError(f"must be 0 (greedy) or {TEMPERATURES[0]:g} to {TEMPERATURES[1]:g}")
    return temperature


class JobSection(Section):
    """The name and the directory of what is run."""

    name: Annotated[
        str,
        spelled(
            r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}",
            "a name of up to 63 letters, digits, dots, underscores and hyphens that begins with a letter or digit",
        ),
    ]
    """Name of the run: the key prefix in the store and the name in trackers."""
    dir: ConfigPath
    """Directory of logs, metrics, samples, checkpoints and the embedded store. Must not exist yet, unless resuming."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Everything random derives from it: data order, sampling seeds, initial heads."""
    checkpoint_url: CheckpointUrl | None = None
    """Where checkpoints live, a folder or an fsspec URL (s3://bucket/run; with the extra `s3`), reached by the
    controller and every rank of the trainers. Absent: the folder checkpoints of `dir`.
    """
    checkpoint_every_steps: PositiveInt = 20
    """Steps between checkpoints; there is always one at the end. Of a run, rows of trained batches stay in the store
    until a checkpoint covers them.
    """
    keep_checkpoints: PositiveInt = 2
    """Checkpoints kept; older committed ones are deleted."""

    num_steps: NonNegativeInt | None = None
    """Steps; this or num_epochs."""
    num_epochs: PositiveInt | None = None
    """Passes over the data; this or num_steps."""

    @property
    def checkpoints(self) -> str:
        """Folder or URL of the checkpoints."""
        return self.checkpoint_url or str(self.dir / "checkpoints")

    @model_validator(mode="after")
    def _length_is_given_once(self) -> Self:
        if (self.num_steps is None) == (self.num_epochs is None):
            both = f" ({self.num_steps} and {self.num_epochs}): set the other to null" if self.num_epochs else ""
            raise ValueError(f"give one of run.num_steps and run.num_epochs{both}")
        return self


class RunSection(JobSection):
    """The run: its name, its directory and its length."""

    num_steps: NonNegativeInt | None = None
    """Train batches to apply, this or num_epochs; with 0 the run is its evaluation of the model, and leaves no
    checkpoint. `rolecall check` says how many epochs they are.
    """
    num_epochs: PositiveInt | None = None
    """Passes over the prompts of all data.train files that fit: as many steps as they make whole batches of
    algorithm.groups_per_batch, less what is left at the end. `rolecall train` and `rolecall check` count them, the
    prompts too; roles that are started alone cannot. Where groups are dropped (algorithm.filters), prompts that follow
    take their places: the steps stay, and more passes are made.
    """
    deterministic: bool = False
    """Whether a run that is made again ends in the same weights, bit for bit, whoever was killed in it: nothing depends
    on which responses are computed together. On CPUs rollouts then compute one response at a time, on GPUs by kernels
    that do not see the batch (vLLM's VLLM_BATCH_INVARIANT). docs/configuration.md says what else must be the same.
    """

    @property
    def total_steps(self) -> int:
        """Train batches to apply. ConfigError where the file gives num_epochs, and nobody has counted what they are."""
        if self.num_steps is None:
            raise ConfigError(
                "run.num_epochs: `rolecall train` counts the prompts for roles that it starts, and nobody does for "
                "others; give run.num_steps, which `rolecall check` says"
            )
        return self.num_steps


def _the_templates_own(given: dict[str, JsonValue]) -> dict[str, JsonValue]:
    decided = {"messages", "conversation", "tools", "tokenize", "add_generation_prompt", "chat_template"}
    taken = sorted(decided & set(given))
    if taken:
        raise ValueError(f"{', '.join(taken)} is decided by the run; give what the template itself reads")
    return given


class ModelSection(Section):
    """The policy everyone starts from."""

    path: ConfigPath
    """Hugging Face model directory (config.json, *.safetensors, tokenizer)."""
    dtype: Dtype = "bfloat16"
    """Type that weights are computed in and published in. The optimizer's master weights are float32. float16
    rounds eight times more finely than bfloat16, which brings sampler and trainer together (Qi et al. 2025,
    arXiv:2510.26788); it is for models whose activations stay below 65,504.
    """
    head_dtype: Literal["model", "float32"] = "model"
    """Type that logits are computed in, by trainers, references and rollouts alike. `float32`: the output layer's
    products of bfloat16 weights and hidden states are not rounded, by up to 0.06 on logits from 16 on, at the price of
    computing them again in the backward pass.
    """
    freeze_vision_tower: bool = False
    """Leave the part that reads images of a model of text and images as it is, in the actor, the critic and `rolecall
    sft`; without images (data.images_field) it stays so in any case. Its features then cost a forward pass alone, and
    it takes no moments.
    """
    freeze_routers: bool = False
    """Leave the routers of a mixture of experts as they are, in the actor, the critic and `rolecall sft`: which experts
    a token goes to then changes with its hidden states alone.
    """
    chat_template: ConfigPath | None = None
    """File of a Jinja chat template by which prompts are rendered, in place of all that the tokenizer has. Checkpoints
    and exports hold it in their place. Absent: the tokenizer's.
    """
    chat_template_kwargs: Annotated[dict[str, JsonValue], AfterValidator(_the_templates_own)] = {}
    """What the chat template is given besides the conversation and its tools, as {enable_thinking: false}: everywhere
    that a prompt is rendered, and part of the tokenizer's digest.
    """


class DataSection(Section):
    """Prompts: JSONL or parquet, one prompt a line; its id is the field `uid`, or else the number of the line, from the
    second file on after that of the file (2:17). See `rolecall/data/dataset.py` for what a row must be.
    """

    train: DataFiles
    """File of training prompts, or a list of several, which are one set in this order."""
    preprocess: PluginSection | None = None
    """A function of your own that makes rows into the fields below. It is called with the fields of each row, of
    held-out sets too, and returns those that are read, or None to leave the row out; always the same for the same row.
    """
    prompt_field: str = "prompt"
    """Field with the prompt: a string (one user message) or a list of {role, content}."""
    ground_truth_field: str = "ground_truth"
    """Field with what the scorer compares with: a string, or a list of right answers."""
    images_field: str | None = None
    """Field with the images that a row's prompt shows, in their order: a list of paths, or of {bytes, path} as parquet
    files hold them. A message shows one where its text says `<image>` or its content is a list with {type: image}.
    For models of text and images. Absent: prompts are text.
    """
    system_prompt: str | None = None
    """A system message put before every prompt that has none."""
    max_prompt_tokens: PositiveInt = 1024
    """Prompts longer than this when rendered are refused and counted, never truncated. Images count with the tokens
    that the model makes of them; max_pixels of its preprocessor_config.json bounds those of one, or size.longest_edge
    beside size.shortest_edge where that file has no max_pixels.
    """
    max_prompts: PositiveInt | None = None
    """Most rows that are used, to try a large file cheaply: so many of all rows of all files, drawn evenly by a shuffle
    that is the same for every run and seed, so that fewer are among more; they keep their order and their ids. What is
    too long is left out of these. Absent: all.
    """
    shuffle: bool = True
    """Another deterministic order in every epoch, over all files; false keeps theirs."""

    @model_validator(mode="after")
    def _system_prompt_shows_none(self) -> Self:
        check_system_prompt(self.system_prompt, self.images_field)
        return self


class SamplingSection(Section):
    """The sampling of training responses. The sampler's distribution is softmax(logits / temperature), untouched:
    training allows nothing else.
    """

    num_responses: NumResponses = 8
    """G, responses per prompt."""
    temperature: Annotated[float, Field(ge=TEMPERATURES[0], le=TEMPERATURES[1])] = 1.0
    """Logits are divided by it, 0.01 to 2; also when logprobs are recomputed."""
    max_tokens: PositiveInt = 1024
    """Longest response, stop token included."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response besides the model's EOS ids."""


class EvaluationSet(Section):
    """One held-out set with sampling of its own."""

    path: ConfigPath
    """File of prompts, same fields as the training data."""
    max_prompts: PositiveInt | None = None
    """Most rows that are used, drawn as by data.max_prompts: the same in every evaluation of every run. Absent: all."""
    num_responses: NumResponses = 1
    """n, responses per prompt: reward and accuracy are means over all, pass@k and maj@k are reported for the powers of
    two up to n and for n, and of graded rewards best@k and worst@k.
    """
    temperature: Annotated[float, AfterValidator(_greedy_or_sampled)] = 0.0
    """0 is greedy; else 0.01 to 2."""
    top_p: UnitFloat = 1.0
    """Nucleus mass."""
    top_k: NonNegativeInt = 0
    """Most tokens that may be drawn, the likeliest; 0: all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Least probability that a token may be drawn with, as a share of the likeliest one's; 0: any."""
    max_tokens: PositiveInt | None = None
    """Longest response; absent: sampling.max_tokens."""


class EvaluationSection(Section):
    """Evaluation on pinned weights: at step 0 unless `at_start` is false, every k steps, and at the end."""

    at_start: bool = True
    """Whether the model that the run starts from is evaluated, at step 0."""
    every_steps: NonNegativeInt = 0
    """Steps between evaluations; 0: none but the first and the last."""
    beside: bool = False
    """Whether the next step is sampled and trained meanwhile; its publish waits for the evaluation. Not with rollouts
    that sleep while the trainers work (rollout.sleep_mode).
    """
    sets: Named[EvaluationSet] = {}
    """Held-out sets by name. With an environment a name has at most 200 characters, printable ASCII."""
