"""TRL's side of vs_peers.py, in an environment of its own: what GRPOTrainer's methods make of the cases in a folder.

    python peer_trl.py FOLDER       # cases.json and inputs.npz; writes outputs.npz

The trainer is made without a model: its methods get logprobs, responses and rewards from here. Nothing else is changed.
Shapes: B responses; T response tokens, masked where shorter.
"""

import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peer_cases import answer

Arrays = dict[str, np.ndarray]
PAD = 0


class Trainer(GRPOTrainer):  # type: ignore[misc]  # libraries of another environment have no types here
    """A GRPOTrainer whose model is a table."""

    def __init__(self, given: dict[str, torch.Tensor], **options: Any) -> None:
        """`options` are GRPOConfig's."""
        self.args = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to=[], **options)
        self.given, self.accelerator = given, Accelerator(cpu=True)
        for name, value in vars(self.args).items():
            if name not in vars(self):
                setattr(self, name, value)
        self.importance_sampling_level, self.epsilon_low = self.args.importance_sampling_level, self.args.epsilon
        self.epsilon_high = self.args.epsilon_high if self.args.epsilon_high is not None else self.args.epsilon
        # Not training: the loss is divided by no accumulated steps.
        self.model = SimpleNamespace(training=False, is_gradient_checkpointing=False)
        self._metrics: Any = defaultdict(lambda: defaultdict(list))
        self._logs: Any = defaultdict(list)
        self._logs |= {"rewards": defaultdict(list), "extra": defaultdict(list)}
        self._pending_extra_logs: dict[str, Any] = {}
        self._pending_metrics: dict[str, Any] = {}
        self.aux_loss_enabled = self.use_adaptive_entropy = False
        self._entropy_bonus_enabled = bool(self.args.entropy_coef)
        self.tools, self.environment_factories, self._is_vlm, self.ref_model = None, None, False, None
        self.rollout_func, self.environments = None, None
        self.num_generations_eval = self.num_generations
        self._tokenizer = SimpleNamespace(pad_token_id=PAD)
        self.reward_funcs = self.reward_func_names = (
            [str(k) for k in range(given["rewards"].shape[1])] if "rewards" in given else []
        )
        if self.reward_funcs:
            self.reward_weights = given["weights"]

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        return self.given["logprobs"], self.given["entropies"], None

    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        ids = [[1, 2] for _ in prompts]
        return ids, ids, None, ["x"] * len(prompts), None, {}, None, None

    def _calculate_rewards(self, *_: Any) -> torch.Tensor:
        return self.given["rewards"]


def loss(given: dict[str, torch.Tensor], **options: Any) -> Arrays:
    """The whole loss and its gradient: with KL, entropy bonus and correction where `options` and inputs have them."""
    leaf, mask = given["logprobs"].requires_grad_(), given["mask"]
    inputs: dict[str, Any] = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.int64),
        "completion_ids": torch.ones(mask.shape, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": given["advantages"],
        "old_per_token_logps": given["old"],
        "num_items_in_batch": mask.sum(),
        **{name: given[name] for name in ("ref_per_token_logps", "importance_sampling_ratio") if name in given},
    }
    value = Trainer(given, use_vllm="importance_sampling_ratio" in given, **options)._compute_loss(None, inputs)
    (gradient,) = torch.autograd.grad(value, leaf)
    return {"loss": value.detach().numpy(), "gradient": gradient.numpy()}


def advantages(given: dict[str, torch.Tensor], **options: Any) -> Arrays:
    """[B]: from rewards [B, K] in groups of num_generations, one after another."""
    trainer = Trainer(given, per_device_train_batch_size=len(given["rewards"]), **options)
    return {
        "advantages": trainer._generate_and_score_completions([{"prompt": "p"}] * len(given["rewards"]))[
            "advantages"
        ].numpy()
    }


if __name__ == "__main__":
    answer(Path(sys.argv[1]), globals(), torch.from_numpy)
