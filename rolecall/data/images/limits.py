"""The limits of models of text and images in a run, beside those of their layouts (trainable.check_parallel): which
of its models see what prompts show. No torch.
"""

from collections.abc import Iterator

from rolecall.data.images.tokens import (
    FAMILIES,
    VisualTokens,
    read_processor_digest,
    read_visual_tokens,
    require_visual_tokens,
)
from rolecall.data.model.files import ModelFacts, model_json, sees_images
from rolecall.errors import ConfigError
from rolecall.settings import CriticSection, ReferenceSection, RunSettings, SftSettings


def check_images(settings: RunSettings, facts: ModelFacts) -> Iterator[str]:
    """Yields a line on the vision tower of the run's model, which `facts` tell of, where it has one. ConfigError where
    a setting asks for what a model has not.
    """
    path = settings.model.path
    _check_freeze(settings)
    if settings.shows_images:
        _check_others(settings)
    if not sees_images(path):
        return
    _check_dtype(settings)
    why = "as adapters are of the language model alone" if settings.actor.lora is not None else "as it is asked to"
    if not settings.shows_images:
        why = "as no images are shown (data.images_field, environments.*.max_image_bytes)"
    stays = settings.freezes_vision_tower or settings.actor.lora is not None
    is_glm = model_json(path / "config.json").get("model_type") == "glm4v"
    whole = [each for each in (settings.actor, settings.critic) if each is not None and each.lora is None]
    on_gpus = not settings.freezes_vision_tower and any(each.devices for each in whole)
    if is_glm and settings.run.deterministic and on_gpus:
        raise ConfigError(
            f"run.deterministic: torch computes the gradient of where patches stand in the vision tower of model.path "
            f"{path}, a glm4v, in another order each time on GPUs; set model.freeze_vision_tower"
        )
    yield (
        f"vision tower: {facts.num_tower_parameters / 1e6:,.2f}M of these parameters, "
        + (f"which stay as they are, {why}" if stays else "trained with the rest (model.freeze_vision_tower)")
    )


def check_sft_images(settings: SftSettings) -> VisualTokens | None:
    """The tokens of the images that examples of `rolecall sft` show; None: they are text. ConfigError as
    `check_images`.
    """
    _check_freeze(settings)
    if not settings.shows_images:
        return None
    tokens = require_visual_tokens(settings.model.path)
    _check_dtype(settings)
    return tokens


def _check_freeze(settings: RunSettings | SftSettings) -> None:
    path = settings.model.path
    if settings.model.freeze_vision_tower and not sees_images(path):
        raise ConfigError(f"model.freeze_vision_tower: model.path {path} has no vision tower; leave it out")


def _check_dtype(settings: RunSettings | SftSettings) -> None:
    if settings.model.dtype == "float16":
        raise ConfigError(
            f"model.dtype float16: model.path {settings.model.path} is a model of text and images, whose rollouts and "
            "vision towers were not tried in it; set bfloat16"
        )


def _check_others(settings: RunSettings) -> None:
    """The critic and the references are given the same tokens and pixels of images as the policy."""
    sections: dict[str, ReferenceSection | CriticSection] = {
        f"references.{name}": section for name, section in settings.references.items()
    }
    if settings.critic is not None:
        sections["critic"] = settings.critic
    own = read_visual_tokens(settings.model.path)
    for name, section in sections.items():
        setting, path = f"{name}.path", section.path
        if path is None:
            continue
        tokens = read_visual_tokens(path, setting)
        if tokens is None:
            raise ConfigError(
                f"{setting} {path} is no model that sees images, which this run shows (data.images_field, "
                f"environments.*.max_image_bytes); name one ({', '.join(FAMILIES)}), or leave it out: model.path takes "
                "its place"
            )
        if tokens != own:
            raise ConfigError(
                f"{setting} {path} takes other tokens for an image than model.path: {tokens}, not {own}; name a model "
                "of the same family and image processor"
            )
        if read_processor_digest(path, setting) != read_processor_digest(settings.model.path):
            raise ConfigError(
                f"{setting} {path} is given other pixels of an image than model.path, by its preprocessor_config.json; "
                "name a model of the same image processor"
            )
