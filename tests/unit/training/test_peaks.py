"""The table of peaks: whole names, and no answer rather than a wrong one."""

import pytest
import torch

from rolecall.training.account.peaks import peak_flops


def test_a_known_device_has_its_makers_dense_figures() -> None:
    assert peak_flops("NVIDIA A100-SXM4-80GB", torch.bfloat16) == 312e12
    assert peak_flops("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989.4e12
    assert peak_flops("NVIDIA H100 80GB HBM3", torch.float32) == pytest.approx(66.9e12)


@pytest.mark.parametrize(
    "name", [None, "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA L40S Laptop GPU", "H100", "AMD Instinct MI300X"]
)
def test_what_is_not_in_the_table_is_unknown(name: str | None) -> None:
    assert peak_flops(name, torch.bfloat16) is None


def test_a_type_without_a_figure_is_unknown() -> None:
    assert peak_flops("NVIDIA A100-SXM4-80GB", torch.float64) is None
