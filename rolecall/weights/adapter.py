"""The adapter: LoRA tensors that came over the weight channel, put into the running vLLM engine under the one id that
every request names.

Owns vLLM's way of taking an adapter from memory, and the check that it took all of it. Like the receiver it runs in
vLLM's worker. The engine has read the base from the model directory by itself, and the probe shows whether base and
adapter together are the actor's model.
"""

from collections.abc import Iterable

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.model_executor.models.utils import is_pp_missing_parameter

from rolecall.errors import TornWeightsError
from rolecall.v1 import weights_pb2

POLICY = LoRARequest(lora_name="policy", lora_int_id=1, lora_path="sent over the weight channel")
"""What every request names. vLLM reads the path of an adapter that it does not hold; this one is installed before
anything is served.
"""


def install(model: torch.nn.Module, spec: weights_pb2.LoraAdapter, tensors: dict[str, torch.Tensor]) -> None:
    """Replaces the policy's adapter by `tensors` (peft's names). Requests must be paused.

    TornWeightsError, with the adapter before still in place, when some tensor is not half of a pair of `spec.rank` or
    the engine has no place for it.
    """
    manager = model.lora_manager
    assert isinstance(manager, LoRAModelManager)  # as the engine was started with LoRA
    mapper = (
        manager.model.hf_to_vllm_mapper.get_rename_mapper() if hasattr(manager.model, "hf_to_vllm_mapper") else None
    )
    config = PEFTHelper(r=spec.rank, lora_alpha=spec.alpha, target_modules=[])
    adapter = LoRAModel.from_lora_tensors(
        POLICY.lora_int_id, tensors, config, device="cpu", dtype=manager.lora_config.lora_dtype, weights_mapper=mapper
    )
    _require_pairs(adapter, spec.rank)
    _require_places(adapter.loras, manager)
    manager.remove_adapter(adapter.id)
    manager.add_adapter(adapter)
    manager.activate_adapter(adapter.id)


def _require_pairs(adapter: LoRAModel, rank: int) -> None:
    for name, pair in adapter.loras.items():
        if pair.lora_a is None or pair.lora_b is None or (pair.lora_a.shape[0], pair.lora_b.shape[1]) != (rank, rank):
            raise TornWeightsError(
                f"the adapter of {name} is not a pair of lora_A [{rank}, in] and lora_B [out, {rank}]; the actor's "
                "export is broken"
            )


def _require_places(names: Iterable[str], manager: LoRAModelManager) -> None:
    """Every module that the adapter changes is another stage's, or one that the engine gives an adapter to. That may be
    fused with others (q, k and v).
    """
    places = {part for module in manager.modules for part in manager.packed_modules.get(module, [module])}
    homeless = sorted(name for name in set(names) - places if not is_pp_missing_parameter(f"{name}.", manager.model))
    if homeless:
        more = f" and {len(homeless) - 3} more" if len(homeless) > 3 else ""
        raise TornWeightsError(
            f"vLLM takes no adapter at {', '.join(homeless[:3])}{more}; name others in actor.lora.target_modules"
        )
