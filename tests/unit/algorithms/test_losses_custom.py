"""A policy loss that the user wrote: the example, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rolecall.algorithms.losses import PolicyBatch, token_losses
from rolecall.algorithms.losses.custom import load
from rolecall.errors import ConfigError, OwnFunctionError
from rolecall.settings import AlgorithmSection, CustomLoss
from rolecall.training.objective.objectives import policy_columns

EXAMPLE = Path(__file__).parents[3] / "examples" / "custom_loss"


def batch() -> PolicyBatch:
    """One sequence, its last token not trained on."""
    mask, zeros = torch.tensor([True, True, False]), torch.zeros(3)
    logprobs = torch.full((3,), -1.0, requires_grad=True)
    columns = {"rollout_logprobs": torch.tensor([-2.0, -0.01, -2.0])}
    return PolicyBatch(
        logprobs,
        logprobs.detach() - torch.tensor([0.5, 0.0, 0.0]),
        torch.tensor([1.0, 1.0, torch.inf]),
        mask,
        zeros.long(),
        1,
        columns,
    )


def of(name: str, folder: Path, source: str) -> CustomLoss:
    (folder / f"{name}.py").write_text(source)
    return CustomLoss(function=f"{folder}/{name}:loss")


def test_the_example_learns_from_unlikely_tokens_alone() -> None:
    section = CustomLoss(
        function=f"{EXAMPLE}/unlikely:unlikely", options={"max_prob": 0.9}, columns=("rollout_logprobs",)
    )
    losses = token_losses(section, batch())
    assert losses.losses_N.tolist() == pytest.approx([-1.2, 0.0, 0.0])
    assert losses.shown["custom/unlikely"].tolist() == [True, False, True]


def test_its_columns_are_packed_for_it() -> None:
    section = CustomLoss(function=f"{EXAMPLE}/unlikely:unlikely", columns=("token_rewards",))
    assert "token_rewards" in policy_columns(AlgorithmSection(groups_per_batch=1, policy_loss=section))


def test_a_function_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.policy_loss\.function 'unlikely:likely'"):
        token_losses(CustomLoss(function=f"{EXAMPLE}/unlikely:likely"), batch())


def test_options_that_the_function_does_not_take_are_named() -> None:
    with pytest.raises(
        ConfigError,
        match=r"'unlikely:unlikely' cannot be called with a batch and the options \['max_probb'\]: "
        r".*missing.*'max_prob'",
    ):
        load(CustomLoss(function=f"{EXAMPLE}/unlikely:unlikely", options={"max_probb": 0.9}))


def test_anything_but_a_loss_per_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OwnFunctionError, match="returned Tensor; return a TokenLosses"):
        token_losses(of("loss_that_sums", tmp_path, "def loss(batch):\n    return batch.logprobs_N.sum()\n"), batch())
    source = (
        "from rolecall.algorithms.losses import TokenLosses\n\n\ndef loss(batch):\n    return "
        "TokenLosses(batch.logprobs_N[:1], {})\n"
    )
    detached = source.replace("logprobs_N[:1]", "logprobs_N.detach()")
    with pytest.raises(OwnFunctionError, match=r"losses_N has no graph to the policy; compute it from"):
        token_losses(of("loss_without_graph", tmp_path, detached), batch())
    with pytest.raises(OwnFunctionError, match=r"losses_N has shape \(1,\); the microbatch has \(3,\)"):
        token_losses(of("loss_of_one", tmp_path, source), batch())


def test_a_function_that_raises_is_named_with_its_line_but_a_lack_of_memory_is_not_its_own(tmp_path: Path) -> None:
    with pytest.raises(OwnFunctionError, match=r"'loss_that_errs:loss' raised AttributeError in .*errs\.py, line 2: "):
        token_losses(of("loss_that_errs", tmp_path, "def loss(batch):\n    return batch.advantage_N\n"), batch())
    source = "from rolecall.algorithms.losses import TokenLosses\ndef loss(batch):\n    return TokenLosses([], {})\n"
    with pytest.raises(OwnFunctionError, match="losses_N is no tensor but list"):
        token_losses(of("loss_of_a_list", tmp_path, source), batch())
    with pytest.raises(MemoryError):
        token_losses(of("loss_of_memory", tmp_path, "def loss(batch):\n    raise MemoryError\n"), batch())


def test_a_microbatch_without_a_token_to_train_on_may_have_zeros_for_its_losses(tmp_path: Path) -> None:
    source = (
        "import torch\nfrom rolecall.algorithms.losses import TokenLosses\n\n\ndef loss(batch):\n"
        "    return TokenLosses(torch.zeros_like(batch.logprobs_N), {})\n"
    )
    masked = replace(batch(), mask_N=torch.zeros(3, dtype=torch.bool))
    token_losses(of("loss_of_nothing", tmp_path, source), masked).losses_N.sum().backward()  # type: ignore[no-untyped-call]
    assert masked.logprobs_N.grad is not None
    assert masked.logprobs_N.grad.tolist() == [0.0, 0.0, 0.0]
