"""The servers that a run starts for its scorers in lines of `rolecall check`: whether their models can be served here,
where they listen, and what of each GPU they take.
"""

import importlib.util
from collections.abc import Iterator

from rolecall.data.model.engine_limits import check_server
from rolecall.data.model.files import read_model
from rolecall.data.shift_plan import gpu_memory_bytes
from rolecall.data.tokenizer import has_chat_template
from rolecall.errors import ConfigError
from rolecall.rpc.listening import why_not
from rolecall.settings import ExternalScorer, ModelServer, RunSettings
from rolecall.settings.sizes.loading import model_bytes
from rolecall.terminal import in_bytes


def model_servers(settings: RunSettings) -> Iterator[Iterator[str]]:
    """Checks the servers that the run starts, each by itself."""
    for name, section in settings.reward.servers.items():
        if section.address is None:
            yield _server(settings, name, section)


def _server(settings: RunSettings, name: str, section: ModelServer) -> Iterator[str]:
    setting = f"reward.servers.{name}"
    if settings.reward.address is not None:
        raise ConfigError(
            f"{setting} is started by `rolecall train`, for the reward service that it starts, too; remove "
            f"reward.address, or start the server beside that service and set {setting}.address"
        )
    what = f"{setting}.{'reward_model.path' if section.served else 'model'}"
    facts = read_model(section.path, what)
    if not has_chat_template(section.path):
        raise ConfigError(
            f"{what}: the tokenizer of {section.path} has no chat template, by which conversations become tokens; set "
            "tokenizer.chat_template and save it"
        )
    if section.served is None:
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(f"{setting}: vLLM, which serves it, is not installed; pip install 'rolecall[rollout]'")
        check_server(section, section.path, setting)
    weights = model_bytes(section.path) / section.num_workers
    yield (
        f"{setting}: {section.path}, {facts.architecture}, {facts.num_parameters / 1e6:,.2f}M parameters, "
        f"{_where(section)}, {_memory(section, weights, setting)}; asked by {_askers(settings, name)}; "
        f"{_bind(section, setting)}"
    )


def _where(section: ModelServer) -> str:
    if section.gpus:
        return f"on GPU {' '.join(map(str, section.gpus))}"
    return f"on CPUs{f', {section.num_workers} workers' if section.num_workers > 1 else ''}"


def _memory(section: ModelServer, weights: float, setting: str) -> str:
    """Says what each worker takes. ConfigError where vLLM's weights are more than its share of a GPU."""
    if section.served is not None or not section.gpus:
        return f"{in_bytes(weights)} of weights per worker"
    present = gpu_memory_bytes()
    for device in section.gpus:
        room = present.get(device, 0) * section.gpu_memory_utilization
        if 0 < room < weights:
            raise ConfigError(
                f"{setting}: {in_bytes(weights)} of weights are more than {section.gpu_memory_utilization:.0%} of GPU "
                f"{device}, {in_bytes(room)}; raise gpu_memory_utilization, or tensor_parallel_size with more devices"
            )
    return f"{in_bytes(weights)} of weights and the cache in {section.gpu_memory_utilization:.0%} of each GPU"


def _askers(settings: RunSettings, name: str) -> str:
    return ", ".join(
        f"{component} with up to {scorer.max_calls} calls at a time"
        for component, scorer in ((each, part.scorer) for each, part in settings.reward.components.items())
        if isinstance(scorer, ExternalScorer) and scorer.server == name
    )


def _bind(section: ModelServer, setting: str) -> str:
    """Says where it listens. ConfigError where that is taken."""
    if section.bind is None or section.bind.endswith(":0"):
        return f"listens on a free port of {(section.bind or '127.0.0.1:0').rpartition(':')[0]}"
    problem = why_not(section.bind)
    if problem:
        raise ConfigError(f"{setting}.bind {section.bind} {problem}")
    return f"listens on {section.bind}, which is free"
