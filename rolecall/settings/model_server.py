"""The section of a model that the run serves to its scorers, and the arguments of vLLM that it may give."""

from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, JsonValue, PositiveInt, ValidationError, model_validator

from rolecall.config_file import read_tree
from rolecall.errors import ConfigError
from rolecall.settings.reward_model import RewardModelSettings
from rolecall.settings.section import ConfigPath, HostPort, ServiceSection, UnitFloat, absolute, problems_of

_BY_KEY = {
    "model": "model",
    "served_model_name": "rubric.model of the scorers that name the server",
    "tensor_parallel_size": "tensor_parallel_size",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "device_ids": "devices",
}
"""Arguments that follow from a key of the section, or of the scorers."""
_OF_JUDGES = ("devices", "tensor_parallel_size", "gpu_memory_utilization", "engine")
"""Keys of a section that say how vLLM is started."""
_ONE_PROCESS = frozenset({"data_parallel_size", "distributed_executor_backend", "nnodes"})
"""Arguments by which vLLM would be on several machines, or be several servers."""


def _none_is_refused(arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
    for name in arguments:
        if name in _BY_KEY:
            raise ValueError(f"{name}: it follows from {_BY_KEY[name]}; set that")
        if name in _ONE_PROCESS:
            raise ValueError(f"{name}: a server is one vLLM on one machine; remove it, or serve the model elsewhere")
    return arguments


ServerArguments: TypeAlias = Annotated[dict[str, JsonValue], AfterValidator(_none_is_refused)]
"""Arguments of vLLM's engine by name that a server may be given."""


def _reward_model_tree(value: object, info: Any) -> object:
    """The keys of a reward model, their paths in full: of the file at the path `value`, or `value` itself."""
    if value is None:
        return None
    try:
        if isinstance(value, str | Path):
            path = Path(str(absolute(value, info)))
            found = RewardModelSettings.model_validate(read_tree(path), context={"base": path.resolve().parent})
        else:
            found = RewardModelSettings.model_validate(value, context=info.context)
    except ConfigError as error:
        raise ValueError(error.message) from error
    except ValidationError as error:
        raise ValueError(problems_of(error)) from error
    return found.model_dump(mode="json", exclude_unset=True)


class ModelServer(ServiceSection):
    """A model that the run serves to its scorers: a generative one behind vLLM's OpenAI-compatible server, for judges,
    or a reward model, for external scorers. Without an `address` the run starts it, on loopback, and starts it again
    when it ends.
    """

    address: HostPort | None = None
    """`host:port` where scorers reach it; absent: local, started by `rolecall train`."""
    bind: HostPort | None = None
    """`host:port` it listens on, without TLS: on loopback, or anywhere behind a mesh; absent: the address."""
    model: ConfigPath | None = None
    """Model directory of a judge's model, as Hugging Face has them, with a tokenizer that has a chat template."""
    reward_model: Annotated[dict[str, Any] | None, BeforeValidator(_reward_model_tree)] = None
    """Reward model of external scorers, in place of `model` and all that is said of it: the file of `rolecall serve
    reward-model`, or what stands in one, but for `bind` (rolecall/settings/reward_model.py).
    """
    tensor_parallel_size: PositiveInt = 1
    """Workers a layer is split over, each with a GPU of `devices`, or on CPUs."""
    gpu_memory_utilization: UnitFloat = 0.9
    """vLLM's share of each GPU."""
    engine: ServerArguments = {}
    """Further arguments of vLLM's engine (AsyncEngineArgs) by their names there, as max_model_len, max_num_seqs or
    dtype; those that another key decides are refused.
    """

    @property
    def served(self) -> RewardModelSettings | None:
        """The settings of its reward model; None of a judge's."""
        return None if self.reward_model is None else RewardModelSettings.model_validate(self.reward_model)

    @property
    def path(self) -> Path:
        """The directory of the model that it serves."""
        path = self.model if self.served is None else self.served.path
        assert path is not None
        return path

    @property
    def gpus(self) -> tuple[int, ...]:
        """GPU indices that it has; empty: CPUs."""
        return self.devices if self.served is None else self.served.devices

    @property
    def num_workers(self) -> int:
        """Processes that compute, each with a GPU of its own or on CPUs."""
        return self.tensor_parallel_size if self.served is None else self.served.num_ranks

    @model_validator(mode="after")
    def _serves_one_model(self) -> Self:
        if (self.model is None) == (self.reward_model is None):
            raise ValueError("model or reward_model: a server has one of them, for judges or for external scorers")
        fields = type(self).model_fields
        of_judges = [key for key in _OF_JUDGES if getattr(self, key) != fields[key].default]
        if self.reward_model is not None and of_judges:
            raise ValueError(f"{of_judges[0]}: it is of a judge's model; say it under reward_model, which has its own")
        if self.devices and len(self.devices) != self.tensor_parallel_size:
            raise ValueError(
                f"devices names {len(self.devices)} GPUs, tensor_parallel_size is {self.tensor_parallel_size}; they "
                "must agree"
            )
        return self

    @model_validator(mode="after")
    def _is_called_on_loopback(self) -> Self:
        if self.served is not None and (self.served.rpc.tls is not None or self.served.bearer_token_file is not None):
            raise ValueError(
                "reward_model: it has rpc.tls or bearer_token_file, and a run calls its servers on loopback without "
                "either; remove them, or start the server yourself and give the scorer its address"
            )
        return self
