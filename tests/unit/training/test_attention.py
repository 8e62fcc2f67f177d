"""Packed attention against one sequence at a time."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from rolecall.errors import ConfigError
from rolecall.training.model.attention.packed import (
    _takes_grouped_heads,
    flash_operands,
    packed_attention,
    plan_attention,
)
from rolecall.training.model.attention.soft_caps import attend_with_cap
from rolecall.training.ranks.device import attends_packed, groups_heads


class GptOssAttention(torch.nn.Module):
    """A layer by its name, which says that its sinks are known."""


MODULE = GptOssAttention()


def random_qkv(
    num_tokens: int, heads: int = 4, kv_heads: int = 2, size: int = 8, value_size: int | None = None
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = ((heads, size), (kv_heads, size), (kv_heads, value_size or size))
    return [torch.randn(1, h, num_tokens, width, generator=generator).requires_grad_() for h, width in shapes]


def oracle(
    qkv: list[torch.Tensor], starts: list[int], window: int | None = None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    outputs = []
    for start, end in pairwise(starts):
        q, k, v = (x[:, :, start:end] for x in qkv)
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)[None]
        allowed = (distance >= 0) & (distance < (window or end))
        if sinks is None:
            out = scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
        else:
            out = eager(q, k, v, allowed, sinks)
        outputs.append(out.transpose(1, 2))
    return torch.cat(outputs, dim=1)


def eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Attention with one more column of scores, by autograd."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
    column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


def packed(
    qkv: list[torch.Tensor], lengths: list[int], *, plain: bool = False, module: torch.nn.Module = MODULE, **more: Any
) -> torch.Tensor:
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    query, key, value = qkv
    plan = plan_attention(lengths, cu_seqlens, torch.float32, plain=plain)
    return packed_attention(module, query, key, value, None, packed=plan, **more)[0]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.sampled_from([None, 1, 3, 16]))
def test_packed_attention_agrees_with_one_sequence_at_a_time(lengths: list[int], window: int | None) -> None:
    qkv = random_qkv(sum(lengths))
    ours, theirs = packed(qkv, lengths, sliding_window=window), oracle(qkv, [0, *np.cumsum(lengths)], window)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    mixture = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    for mine, reference in zip(
        torch.autograd.grad((ours * mixture).sum(), qkv),
        torch.autograd.grad((theirs * mixture).sum(), qkv),
        strict=True,
    ):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("scaling", [None, 0.5])
def test_plain_attention_means_the_same_by_other_roundings(window: int | None, scaling: float | None) -> None:
    qkv, lengths = random_qkv(20, value_size=6), [3, 12, 5]
    fused, plain = (
        packed(qkv, lengths, plain=plain, sliding_window=window, scaling=scaling) for plain in (False, True)
    )
    torch.testing.assert_close(plain, fused, rtol=1e-4, atol=1e-5)
    halves = [x.to(torch.bfloat16) for x in qkv]
    assert not torch.equal(packed(halves, lengths, plain=True), packed(halves, lengths))


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60))
def test_padding_stays_within_its_bound_whatever_the_lengths(lengths: list[int]) -> None:
    plan = plan_attention(lengths, torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32), torch.float32)
    assert sum(bucket.gather_bL.numel() for bucket in plan.buckets) <= 1.25 * sum(lengths)
    assert sorted(torch.cat([bucket.scatter for bucket in plan.buckets]).tolist()) == list(range(sum(lengths)))


def test_sequences_of_one_length_cost_one_call_and_no_padding() -> None:
    plan = plan_attention([5] * 100, torch.arange(0, 505, 5, dtype=torch.int32), torch.float32)
    assert len(plan.buckets) == 1
    assert plan.buckets[0].kept is None


def test_values_may_be_narrower_than_keys() -> None:
    qkv, lengths = random_qkv(20, value_size=6), [3, 12, 5]
    ours, theirs = packed(qkv, lengths), oracle(qkv, [0, *np.cumsum(lengths)])
    assert ours.shape == (1, 20, 4, 6)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(("size", "value_size", "padded"), [(12, 8, 16), (8, 8, 8), (6, 10, 16), (192, 128, 192)])
def test_what_flash_attention_is_given_means_what_the_model_asked(
    grouped: bool, size: int, value_size: int, padded: int
) -> None:
    qkv = random_qkv(9, size=size, value_size=value_size)
    wanted = oracle(qkv, [0, 9])
    query_NHD, key_NKD, value_NKE = (x[0].transpose(0, 1) for x in qkv)
    query, key, value, scale = flash_operands(query_NHD, key_NKD, value_NKE, None, grouped=grouped)
    assert query.shape == (9, 4, padded)
    assert key.shape == value.shape == (9, 2 if grouped else 4, padded)
    assert all(x.is_contiguous() for x in (query, key, value))
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped).transpose(1, 2)
    torch.testing.assert_close(out[..., :value_size], wanted, rtol=1e-4, atol=1e-5)
    assert flash_operands(query_NHD, key_NKD, value_NKE, 0.3, grouped=grouped)[3] == 0.3


def test_heads_that_flash_attention_takes_as_they_are_are_not_copied() -> None:
    given = [x[0].transpose(0, 1).contiguous() for x in random_qkv(9, size=16)]
    taken = flash_operands(given[0], given[1], given[2], None, grouped=True)[:3]
    assert [x.data_ptr() for x in taken] == [x.data_ptr() for x in given]


def test_which_kernel_computes_depends_on_device_and_dtype() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert attends_packed(cuda, torch.bfloat16)
    assert not attends_packed(cuda, torch.float32)
    assert not attends_packed(cpu, torch.bfloat16)
    assert groups_heads(cpu)
    assert not groups_heads(cuda), "its kernels without a matrix of all scores group no heads in float32"


def test_a_layer_whose_heads_are_too_wide_for_flash_attention_takes_the_buckets_beside_others_that_do_not() -> None:
    wide, narrow, lengths = random_qkv(20, size=264), random_qkv(20), [3, 12, 5]
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    plan = replace(plan_attention(lengths, cu_seqlens, torch.float32, head_size=264), flash=True)
    query, key, value = wide
    ours = packed_attention(MODULE, query, key, value, None, packed=plan)[0]
    torch.testing.assert_close(ours, oracle(wide, [0, *np.cumsum(lengths)]), rtol=1e-4, atol=1e-5)
    query, key, value = narrow
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):  # as on every CPU
        packed_attention(MODULE, query, key, value, None, packed=plan)


def test_grouped_heads_are_asked_for_only_where_the_kernel_has_them() -> None:
    def of_torch_2_11(query: Any, key: Any, value: Any, *, scale: Any = None) -> None: ...
    def of_torch_2_13(query: Any, key: Any, value: Any, *, scale: Any = None, enable_gqa: bool = False) -> None: ...

    assert not _takes_grouped_heads(of_torch_2_11)
    assert _takes_grouped_heads(of_torch_2_13)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.sampled_from([None, 1, 3, 16]), st.floats(-20, 20))
def test_sinks_take_part_in_every_row_and_learn(lengths: list[int], window: int | None, level: float) -> None:
    qkv = random_qkv(sum(lengths))
    sinks = (level + torch.tensor([-3.0, 0.0, 2.0, 5.0])).requires_grad_()
    given = [*qkv, sinks]
    theirs = oracle(qkv, [0, *np.cumsum(lengths)], window, sinks)
    mixture = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1))
    references = torch.autograd.grad((theirs * mixture).sum(), given)
    for plain in (False, True):
        ours = packed(qkv, lengths, plain=plain, sliding_window=window, s_aux=sinks)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        for mine, reference in zip(torch.autograd.grad((ours * mixture).sum(), given), references, strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_gradients_with_sinks_are_those_of_differences(window: int | None) -> None:
    qkv, sinks = [x.detach().double().requires_grad_() for x in random_qkv(7)], torch.randn(4).double()
    torch.autograd.gradcheck(
        lambda q, k, v, s: packed([q, k, v], [3, 4], sliding_window=window, s_aux=s), (*qkv, sinks.requires_grad_())
    )


def test_half_precision_with_sinks_stays_as_close_as_without() -> None:
    qkv, lengths, sinks = random_qkv(60, size=32), [3, 40, 17], torch.tensor([-1.0, 0.0, 1.0, 3.0])
    halves = [x.detach().bfloat16().requires_grad_() for x in qkv]

    def distances(given: torch.Tensor | None) -> list[float]:
        exact, rounded = packed(qkv, lengths, s_aux=given), packed(halves, lengths, s_aux=given)
        assert rounded.dtype == torch.bfloat16
        pairs = [(exact.detach(), rounded.detach())]
        pairs += zip(
            torch.autograd.grad(exact.sin().sum(), qkv), torch.autograd.grad(rounded.sin().sum(), halves), strict=True
        )
        return [((mine.float() - theirs).norm() / theirs.norm()).item() for theirs, mine in pairs]

    for with_sinks, without in zip(distances(sinks), distances(None), strict=True):
        assert with_sinks < 2 * without


class Gemma2Attention(torch.nn.Module):
    """A layer by its name, which says that its cap is known."""


def capped_oracle(qkv: list[torch.Tensor], starts: list[int], window: int | None, cap: float) -> torch.Tensor:
    """Every sequence by itself, its whole matrix of scores, by autograd."""
    outputs = []
    for start, end in pairwise(starts):
        q, k, v = (x[:, :, start:end] for x in qkv)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)[None]
        scores = cap * torch.tanh(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 / cap)
        allowed = (distance >= 0) & (distance < (window or end))
        outputs.append((scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v).transpose(1, 2))
    return torch.cat(outputs, dim=1)


def same_with_gradients(ours: torch.Tensor, theirs: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    mixture = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    for mine, reference in zip(
        torch.autograd.grad((ours * mixture).sum(), inputs),
        torch.autograd.grad((theirs * mixture).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.sampled_from([None, 1, 3, 16]))
def test_scores_with_a_soft_cap_agree_with_one_sequence_at_a_time(lengths: list[int], window: int | None) -> None:
    qkv, starts = random_qkv(sum(lengths)), [0, *np.cumsum(lengths)]
    ours = packed(qkv, lengths, module=Gemma2Attention(), sliding_window=window, softcap=0.7)
    same_with_gradients(ours, capped_oracle(qkv, starts, window, 0.7), qkv)


@pytest.mark.parametrize("window", [None, 1, 5, 12])
@pytest.mark.parametrize("max_scores", [1, 100, 500])
def test_a_soft_cap_means_the_same_however_few_queries_are_taken_at_a_time(window: int | None, max_scores: int) -> None:
    qkv = random_qkv(12, heads=2)
    query, key, value = qkv
    ours = attend_with_cap(query, key, value, None, window, 0.7, max_scores=max_scores).transpose(1, 2)
    same_with_gradients(ours, capped_oracle(qkv, [0, 12], window, 0.7), qkv)


def test_backward_of_a_soft_cap_keeps_nothing_that_grows_with_the_square_of_the_length() -> None:
    query, key, value = random_qkv(64, heads=2, kv_heads=2)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attend_with_cap(query, key, value, None, None, 0.7, max_scores=2 * 64 * 8)
    assert kept
    assert {each.untyped_storage().data_ptr() for each in kept} <= {
        x.untyped_storage().data_ptr() for x in (query, key, value)
    }


@pytest.mark.parametrize("extra", [{"dropout": 0.1}, {"softcap": 30.0}])
def test_what_packed_attention_does_not_have_is_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        packed(random_qkv(3), [3], **extra)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 7])
def test_scores_with_a_soft_cap_on_a_gpu_agree_with_one_sequence_at_a_time(window: int | None) -> None:
    lengths = [3, 40, 17]
    given = [x.detach() for x in random_qkv(60, size=64)]
    ours = [x.cuda().to(torch.bfloat16) for x in given]
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")
    plan = plan_attention(lengths, cu_seqlens, torch.bfloat16, takes_buckets=True)
    query, key, value = ours
    out, _ = packed_attention(
        Gemma2Attention(), query, key, value, None, packed=plan, sliding_window=window, softcap=0.7
    )
    wanted = capped_oracle([x.to(torch.bfloat16).float() for x in given], [0, *np.cumsum(lengths)], window, 0.7)
    torch.testing.assert_close(out.cpu().float(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 7])
def test_attention_with_sinks_on_a_gpu_agrees_with_one_sequence_at_a_time(
    window: int | None, dtype: torch.dtype
) -> None:
    lengths = [3, 40, 17]
    given = [*(x.detach() for x in random_qkv(60, size=64)), torch.tensor([-3.0, 0.0, 2.0, 5.0])]
    ours = [x.cuda().to(dtype).requires_grad_() for x in given]
    theirs = [x.to(dtype).float().requires_grad_() for x in given]
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")
    plan = plan_attention(lengths, cu_seqlens, dtype)
    query, key, value, sinks = ours
    out = packed_attention(MODULE, query, key, value, None, packed=plan, sliding_window=window, s_aux=sinks)[0]
    wanted = oracle(theirs[:3], [0, *np.cumsum(lengths)], window, theirs[3])
    rtol, atol = (2e-2, 2e-2) if dtype == torch.bfloat16 else (1e-4, 1e-5)
    torch.testing.assert_close(out.cpu().float(), wanted, rtol=rtol, atol=atol)
    mixture = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad((out.float() * mixture.cuda()).sum(), ours)
    for mine, reference in zip(grads, torch.autograd.grad((wanted * mixture).sum(), theirs), strict=True):
        torch.testing.assert_close(mine.cpu().float(), reference, rtol=rtol, atol=atol)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 320])
def test_layers_of_narrow_and_wide_heads_on_a_gpu_attend_by_one_plan(size: int) -> None:
    lengths = [3, 40, 17]
    given = [x.detach() for x in random_qkv(60, size=size)]
    query, key, value = (x.cuda().bfloat16() for x in given)
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")
    plan = plan_attention(lengths, cu_seqlens, torch.bfloat16, head_size=320)
    assert plan.flash
    out = packed_attention(MODULE, query, key, value, None, packed=plan, sliding_window=7)[0]
    wanted = oracle([x.bfloat16().float() for x in given], [0, *np.cumsum(lengths)], 7)
    torch.testing.assert_close(out.cpu().float(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("value_size", [64, 40])
@pytest.mark.parametrize("window", [None, 7])
def test_flash_attention_on_a_gpu_agrees_with_buckets(window: int | None, value_size: int) -> None:
    lengths = [3, 40, 17]
    query, key, value = (x.detach().cuda().bfloat16() for x in random_qkv(60, size=64, value_size=value_size))
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")
    flash, buckets = (
        packed_attention(
            MODULE, query, key, value, None, packed=plan_attention(lengths, cu_seqlens, dtype), sliding_window=window
        )[0]
        for dtype in (torch.bfloat16, torch.float32)
    )
    torch.testing.assert_close(flash, buckets, rtol=2e-2, atol=2e-2)
