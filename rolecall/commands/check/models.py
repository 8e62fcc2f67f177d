"""The models of a run in lines of `rolecall check`: whether they can be trained, sampled from and read the same ids."""

from collections.abc import Iterator
from pathlib import Path

from rolecall.commands.check.capacity import check_cache
from rolecall.commands.check.preflight import NOTE
from rolecall.data.images.limits import check_images
from rolecall.data.megatron.limits import check_megatron, require_installed
from rolecall.data.megatron.stages import head_of, split_layers
from rolecall.data.model.adapters import check_start, with_modules
from rolecall.data.model.engine_limits import check_engine, engine_tokens
from rolecall.data.model.files import (
    ModelFacts,
    check_routers,
    check_tokenizer,
    eos_token_ids,
    has_recurrent_layers,
    max_model_tokens,
    read_model,
    text_config,
    vocab_size,
)
from rolecall.data.model.mixture import read_mixture
from rolecall.data.model.rope import describe_factors
from rolecall.data.model.trainable import check_parallel, check_trainable
from rolecall.data.tokenizer import ChatTokenizer, read_ids_digest
from rolecall.errors import ConfigError
from rolecall.identity import adapters_to_begin_with
from rolecall.settings import ALL_LINEAR, CriticSection, LoraSection, ReferenceSection, RunSettings, TrainerSection


def policy_model(settings: RunSettings, facts: ModelFacts) -> Iterator[str]:
    """Yields lines on the policy's model. ConfigError where a trainer or the rollouts cannot take it."""
    path = settings.model.path
    yield f"model: {path}, {facts.architecture}, {facts.num_parameters / 1e6:,.2f}M parameters, {settings.model.dtype}"
    also = settings.sampling.stop_token_ids
    check_trainable(path)
    yield from _layout(settings, settings.actor, path, "model.path", "actor")
    yield from check_images(settings, facts)
    if has_recurrent_layers(text_config(path)):
        yield (
            "recurrent layers: each sequence goes through them by itself, a prompt once for each response, and the "
            "sampler keeps no prefixes; on GPUs transformers takes flash-linear-attention where it is installed"
        )
    yield from _adapters(settings, settings.actor.lora, path, "actor.lora")
    moe, freezes = settings.actor.moe, settings.model.freeze_routers
    check_routers(path, moe, freezes)
    if freezes:
        yield "routers: stay as they are (model.freeze_routers)"
    if moe is not None:
        yield (
            f"routers: balance_coef {moe.balance_coef:g}, z_coef {moe.z_coef:g}, over all tokens of a mini-batch, "
            "prompts included"
        )
    if settings.actor.router_replay != "off":
        yield _router_replay(settings)
    yield f"EOS ids: {', '.join(map(str, eos_token_ids(path)))}" + (
        f"; also stops at {', '.join(map(str, also))}" if also else ""
    )
    prompt, bound = settings.data.max_prompt_tokens, max_model_tokens(path)
    yield (
        f"max model length: {bound} tokens; prompt up to {prompt} + response up to {settings.sampling.max_tokens} = "
        f"{prompt + settings.sampling.max_tokens}"
    )
    if prompt + settings.sampling.max_tokens > bound:
        raise ConfigError(
            f"data.max_prompt_tokens + sampling.max_tokens = {prompt + settings.sampling.max_tokens} exceed the "
            f"model's {bound}; lower one of them"
        )
    yield from describe_factors(text_config(path), engine_tokens(settings), "model.path")
    for name, section in settings.evaluation.sets.items():
        longest = prompt + (section.max_tokens or 0)
        if longest > bound:
            yield (
                f"{NOTE} data.max_prompt_tokens + evaluation.sets.{name}.max_tokens = {longest} exceed the model's "
                f"{bound}: a response ends there at the latest"
            )
    if settings.rollout.num_replicas:
        check_engine(settings)
        check_cache(settings)


def _adapters(settings: RunSettings, given: LoraSection | None, path: Path, setting: str) -> Iterator[str]:
    """Lines on where the adapters that `setting` names are, and what they are at first, beside the model at `path`;
    none where the file says the one, and they begin with no folder.
    """
    if given is not None and given.target_modules == ALL_LINEAR:
        named = ", ".join(with_modules(given, path, setting).target_modules)
        yield f"adapters: {setting}.target_modules {ALL_LINEAR} are {named}"
    if given is None or given.start is None:
        return
    lora = adapters_to_begin_with(settings, given)
    if lora is None or lora.start is None:
        yield f"adapters: {setting}.start {given.start} is gone; those of the newest checkpoint go on"
        return
    check_start(lora, path, setting)
    yield f"adapters: {setting} begins as those in {lora.start}"


def _layout(settings: RunSettings, section: TrainerSection, path: Path, setting: str, trainer: str) -> Iterator[str]:
    """A line on the stages of this trainer's pipeline, if it has one. ConfigError when the back end does not compute
    the model at `path`, or not in this layout.
    """
    check_parallel(path, section.parallel, setting)
    if settings.actor.backend != "megatron":
        return
    if section.address is None:
        require_installed()
    megatron = settings.actor.megatron
    check_megatron(path, section.parallel, megatron, section.num_ranks, setting)
    if section.parallel.pipeline > 1:
        counts = split_layers(path, section.parallel, megatron, setting, head_of(section))
        yield (
            f"pipeline of {trainer}: {sum(counts)} layers in stages of {', '.join(map(str, counts))}"
            + (f", {megatron.virtual_stages} on each rank" if megatron.virtual_stages > 1 else "")
        )


def _router_replay(settings: RunSettings) -> str:
    """The line on where the actor's tokens are sent, and what it costs."""
    actor, algorithm, mixture = settings.actor, settings.algorithm, read_mixture(settings.model.path)
    whose = "that sampled them, in every pass of the actor" if actor.router_replay == "r3" else "of the old policy"
    alone = algorithm.num_minibatches * algorithm.num_epochs == 1 and actor.router_replay == "r2"
    return (
        f"router replay {actor.router_replay}: tokens go to the experts {whose}; {mixture.num_layers} layers x "
        f"{mixture.num_chosen} of {mixture.num_experts} experts, {mixture.width} bytes a token in the store"
        + ("; one update per batch is its own old policy, so that nothing is replayed" if alone else "")
        + ("; the critic chooses for itself" if settings.critic is not None else "")
    )


def tokenizer_and_models(settings: RunSettings, tokenizer: ChatTokenizer) -> Iterator[str]:
    """Yields lines on the tokenizer and the models that read its ids. ConfigError where one of them does not fit."""
    sections: dict[str, ReferenceSection | CriticSection] = {
        f"references.{name}.path": section for name, section in settings.references.items()
    }
    if settings.critic is not None:
        sections["critic.path"] = settings.critic
    check_tokenizer(settings.model.path, tokenizer.num_ids)
    for setting, section in sections.items():
        yield from _layout(
            settings, section, section.path or settings.model.path, setting, setting.removesuffix(".path")
        )
        if section.path is not None:
            read_model(section.path, setting)
            check_trainable(section.path, setting)
            yield from describe_factors(text_config(section.path), engine_tokens(settings), setting)
            check_tokenizer(section.path, tokenizer.num_ids, setting)
            if read_ids_digest(section.path) not in ("", tokenizer.ids_digest):
                raise ConfigError(
                    f"{setting} {section.path} has the tokenizer of another family, and reads the policy's token ids; "
                    "name a model of the policy's family, or, where its embeddings are of the policy's ids, copy "
                    f"tokenizer.json from {settings.model.path}"
                )
    if settings.critic is not None:
        yield from _adapters(settings, settings.critic.lora, settings.critic.path or settings.model.path, "critic.lora")
    known = vocab_size(settings.model.path)
    yield f"tokenizer: ids up to {tokenizer.num_ids - 1}, the model knows {known}"
    if settings.model.chat_template is not None:
        place = "in place of the tokenizer's own" if tokenizer.replaces_template else "the tokenizer has none"
        yield f"chat template: model.chat_template {settings.model.chat_template}, {place}; checkpoints hold it"
    distillation = settings.algorithm.distillation
    if distillation is not None and distillation.top_k is not None and distillation.top_k >= known:
        raise ConfigError(
            f"algorithm.distillation.top_k {distillation.top_k} is not less than the {known} ids of the model; lower it"
        )
    ends = {
        "sampling.stop_token_ids": settings.sampling.stop_token_ids,
        f"model.path {settings.model.path}: eos_token_id": eos_token_ids(settings.model.path),
    }
    for setting, tokens in ends.items():
        unknown = [token for token in tokens if token < 0 or token >= known > 0]
        if unknown:
            raise ConfigError(
                f"{setting} {unknown} are not ids of the model, which knows 0 to {known - 1}; correct them"
            )
