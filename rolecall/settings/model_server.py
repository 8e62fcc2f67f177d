"""The section of a model that the run serves for its judges, and the arguments of vLLM that it may give."""

from typing import Annotated, Self, TypeAlias

from pydantic import AfterValidator, JsonValue, PositiveInt, model_validator

from rolecall.settings.section import ConfigPath, HostPort, ServiceSection, UnitFloat

_BY_KEY = {
    "model": "model",
    "served_model_name": "rubric.model of the scorers that name the server",
    "tensor_parallel_size": "tensor_parallel_size",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "device_ids": "devices",
}
"""Arguments that follow from a key of the section, or of the scorers."""
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


class ModelServer(ServiceSection):
    """A generative model behind vLLM's OpenAI-compatible server, for judges that name it. Without an `address` the run
    starts it, on loopback, and starts it again when it ends.
    """

    address: HostPort | None = None
    """`host:port` where judges reach it; absent: local, started by `rolecall train`."""
    bind: HostPort | None = None
    """`host:port` it listens on, without TLS: on loopback, or anywhere behind a mesh; absent: the address."""
    model: ConfigPath
    """Model directory, as Hugging Face has them, with a tokenizer that has a chat template."""
    tensor_parallel_size: PositiveInt = 1
    """Workers a layer is split over, each with a GPU of `devices`, or on CPUs."""
    gpu_memory_utilization: UnitFloat = 0.9
    """vLLM's share of each GPU."""
    engine: ServerArguments = {}
    """Further arguments of vLLM's engine (AsyncEngineArgs) by their names there, as max_model_len, max_num_seqs or
    dtype; those that another key decides are refused.
    """

    @property
    def url(self) -> str:
        """The URL that judges call; empty while it has no address."""
        return "" if self.address is None else f"http://{self.address}/v1"

    @model_validator(mode="after")
    def _each_worker_has_a_gpu(self) -> Self:
        if self.devices and len(self.devices) != self.tensor_parallel_size:
            raise ValueError(
                f"devices names {len(self.devices)} GPUs, tensor_parallel_size is {self.tensor_parallel_size}; they "
                "must agree"
            )
        return self
