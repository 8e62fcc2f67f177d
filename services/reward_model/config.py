"""The values that the reward model derives from its settings, and what of its files can be seen without loading it."""

from rolecall.data.model.files import check_tokenizer, max_model_tokens, sees_images, tensor_names
from rolecall.data.model.trainable import check_parallel, check_trainable
from rolecall.errors import ConfigError
from rolecall.reward import Field, Range, description
from rolecall.settings import RewardModelSettings, RunSettings
from rolecall.v1 import reward_pb2

MAX_ITEMS = 256
"""Most items of one call."""
HEADS = ("score.weight", "value_head.weight")
"""The tensors that make a model directory one that scores: of transformers' classification models, and of a critic."""


def config_of_server(settings: RunSettings, name: str) -> RewardModelSettings:
    """Returns the settings of the reward model that is the server `name` of a run. ConfigError when there is none, or
    it has no place.
    """
    section = settings.reward.servers.get(name)
    if section is None or section.served is None:
        raise ConfigError(f"reward.servers.{name} is no reward model; --name takes one of the run's")
    bind = section.bind or section.address
    if bind is None:
        raise ConfigError(f"reward.servers.{name} has no bind: say with it where a server that you start is to listen")
    return section.served.model_copy(update={"name": name, "bind": bind})


def check_files(settings: RewardModelSettings, num_ids: int) -> None:
    """ConfigError when the model directory cannot be served. `num_ids` are its tokenizer's."""
    path = settings.path
    check_trainable(path, "path")
    if sees_images(path, "path"):
        raise ConfigError(
            f"path {path} is a model of text and images, and a reward model reads text alone; use a model of text"
        )
    check_parallel(path, settings.parallel, "path")
    check_tokenizer(path, num_ids, "path")
    if not set(HEADS) & tensor_names(path, "path"):
        raise ConfigError(
            f"path {path} holds none of {', '.join(HEADS)}: it has no head that scores; use a sequence or token "
            "classification model, or a critic's checkpoint"
        )


def max_tokens(settings: RewardModelSettings) -> int:
    """Tokens of the longest conversation that is scored. ConfigError when it is more than the model takes."""
    own = max_model_tokens(settings.path)
    if settings.max_tokens is not None and settings.max_tokens > own:
        raise ConfigError(f"max_tokens {settings.max_tokens} exceeds the model's {own} tokens; lower it")
    return settings.max_tokens or own


def describe(settings: RewardModelSettings) -> reward_pb2.DescribeResponse:
    """Returns the scorer's description of itself."""
    reads: list[Field] = ["messages", "response_text"]
    if settings.reference is not None:
        reads.append("ground_truth")
    token_rewards = settings.process is not None and settings.process.token_rewards
    if token_rewards:
        reads.append("token_ids")
    bounds: Range = (0.0, 1.0) if settings.output == "probability" else (None, None)
    return description(settings.name, bounds, reads, {}, token_rewards, MAX_ITEMS)
