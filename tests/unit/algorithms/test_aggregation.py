"""How token losses become one number, against numbers worked by hand. Against loops and under every cut:
test_losses_proved.py.
"""

from typing import get_args

import numpy as np
import pytest
import torch

from rolecall.algorithms.aggregation import Counts, sequence_index, token_weights
from rolecall.settings import Aggregation

MASK = torch.tensor([False, True, True, False, True])
SEQUENCE = torch.tensor([0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token_mean", [0, 0.2, 0.2, 0, 0.2]),  # DAPO, arXiv:2503.14476, eq. 8: 1 / tokens
        ("token_sum", [0, 1, 1, 0, 1]),
        # GRPO, arXiv:2402.03300, eq. 3: 1 / (sequences x own tokens)
        ("seq_mean_token_mean", [0, 0.125, 0.125, 0, 0.25]),
        ("seq_mean_token_sum", [0, 0.25, 0.25, 0, 0.25]),  # 1 / sequences
        ("seq_mean_token_sum_norm", [0, 0.025, 0.025, 0, 0.025]),  # Dr.GRPO, arXiv:2503.20783: 1 / (sequences x 10)
    ],
)
def test_token_weights_by_hand(kind: Aggregation, expected: list[float]) -> None:
    """Two of a mini-batch's four sequences, with three of its five trained tokens."""
    np.testing.assert_allclose(
        token_weights(MASK, SEQUENCE, 2, kind, Counts(num_tokens=5, num_sequences=4), length=10), expected
    )


@pytest.mark.parametrize("kind", ["token_mean", "seq_mean_token_mean"])
def test_the_weights_of_a_mean_add_up_to_one(kind: Aggregation) -> None:
    assert float(token_weights(MASK, SEQUENCE, 2, kind, Counts(num_tokens=3, num_sequences=2)).sum()) == pytest.approx(
        1.0
    )


@pytest.mark.parametrize("kind", get_args(Aggregation))
def test_a_minibatch_without_trained_tokens_weighs_nothing(kind: Aggregation) -> None:
    assert not token_weights(torch.zeros(5, dtype=torch.bool), SEQUENCE, 2, kind, Counts(0, 0)).any()


def test_packed_tokens_know_their_sequence() -> None:
    assert sequence_index(torch.tensor([0, 3, 4, 6]), 6).tolist() == [0, 0, 0, 1, 2, 2]
