"""Coverage counts the elements that loaders fill, region by region, on parameters without memory."""

import torch

from rolecall.weights.coverage import Coverage


def _fused() -> tuple[torch.Tensor, Coverage]:
    parameter = torch.nn.Parameter(torch.empty(12, 4, device="meta"), requires_grad=False)
    return parameter, Coverage([("qkv", parameter, 48)])


def test_a_fused_parameter_is_whole_when_all_its_parts_were_loaded() -> None:
    parameter, coverage = _fused()
    with coverage.watch():
        for start in (0, 4, 8):
            parameter.data.narrow(0, start, 4).copy_(torch.zeros(4, 4))
    assert coverage.missing() == {}


def test_loading_one_part_twice_does_not_make_up_for_another() -> None:
    parameter, coverage = _fused()
    with coverage.watch():
        for start in (0, 4, 4):
            parameter.data.narrow(0, start, 4).copy_(torch.zeros(4, 4))
    assert coverage.missing() == {"qkv": (32, 48)}


def test_overlapping_parts_are_counted_once() -> None:
    parameter, coverage = _fused()
    with coverage.watch():
        parameter.data[:8].copy_(torch.zeros(8, 4))
        parameter.data[4:10].copy_(torch.zeros(6, 4))
    assert coverage.missing() == {"qkv": (40, 48)}


def test_padding_that_a_loader_fills_counts() -> None:
    parameter, coverage = _fused()
    with coverage.watch():
        parameter.data[:10].copy_(torch.zeros(10, 4))
        parameter.data[10:].fill_(0)
    assert coverage.missing() == {}


def test_a_missing_expert_shows_as_its_share_of_the_stack() -> None:
    stack = torch.nn.Parameter(torch.empty(4, 6, 5, device="meta"), requires_grad=False)
    coverage = Coverage([("experts.w13_weight", stack, stack.numel())])
    with coverage.watch():
        for expert in (0, 1, 3):
            stack.data[expert].narrow(0, 0, 3).copy_(torch.zeros(3, 5))
            stack.data[expert].narrow(0, 3, 3).copy_(torch.zeros(3, 5))
    assert coverage.missing() == {"experts.w13_weight": (90, 120)}


def test_columns_of_a_matrix_count_though_they_leave_gaps() -> None:
    parameter, coverage = _fused()
    with coverage.watch():
        parameter.data[:, :2].copy_(torch.zeros(12, 2))
        parameter.data[:, 2:].copy_(torch.zeros(12, 2))
    assert coverage.missing() == {}


def test_writes_outside_the_watch_and_into_other_tensors_do_not_count() -> None:
    parameter, coverage = _fused()
    parameter.data.copy_(torch.zeros(12, 4))
    with coverage.watch():
        torch.empty(12, 4, device="meta").copy_(torch.zeros(12, 4))
    assert coverage.missing() == {"qkv": (0, 48)}


def test_a_tensor_of_which_no_element_is_read_is_named_whatever_its_bucket_is_read_for() -> None:
    parameter, coverage = _fused()
    bucket = torch.zeros(256, dtype=torch.uint8)
    query, other, key = (bucket[start : start + 64].view(torch.float32).view(4, 4) for start in (0, 64, 128))
    value = torch.zeros(2, 64, dtype=torch.uint8)[1].view(torch.float32).view(4, 4)
    with coverage.watch([("q", query), ("of another stage", other)]):
        parameter.data[:4].copy_(query.view(-1).view(4, 4)[:, 2:].repeat(1, 2))
        assert other.shape == (4, 4), "to look at a shape is no reading"
    with coverage.watch([("k", key), ("v", value)]):
        parameter.data[4:].copy_(torch.cat([key.t(), torch.zeros(4, 4)]))
    assert coverage.unread() == ["of another stage", "v"]
    assert coverage.missing() == {}


def test_a_tied_parameter_is_whole_under_any_of_its_names_and_is_named_when_it_is_under_none() -> None:
    embedding, head, norm = (
        torch.nn.Parameter(torch.empty(*shape, device="meta"), requires_grad=False) for shape in ((6, 4), (6, 4), (4,))
    )
    names, parameters = ("embed", "head", "norm"), (embedding, head, norm)
    coverage = Coverage((name, parameter, parameter.numel()) for name, parameter in zip(names, parameters, strict=True))
    tied = [["embed", "head"]]
    with coverage.watch():
        norm.data.copy_(torch.zeros(4))
    assert coverage.missing_of_tied(tied) == {"embed": (0, 24), "head": (0, 24)}
    with coverage.watch():
        embedding.data[:3].copy_(torch.zeros(3, 4))
    assert coverage.missing_of_tied(tied) == {"embed": (12, 24), "head": (0, 24)}
    with coverage.watch():
        embedding.data[3:].copy_(torch.zeros(3, 4))
    assert coverage.missing_of_tied(tied) == {}


def test_a_parameter_that_nobody_wrote_is_missing_though_its_module_stands_in_two_places() -> None:
    """As a mixture's router does: `mlp.gate` and `mlp.experts.gate`."""
    router = torch.nn.Parameter(torch.empty(4, 8, device="meta"), requires_grad=False)
    names = ["mlp.gate.weight", "mlp.experts.gate.weight"]
    coverage = Coverage([(name, router, 32) for name in names])
    ((_, counts),) = coverage.missing_of_tied([names]).items()
    assert counts == (0, 32)
    with coverage.watch():
        router.data.copy_(torch.zeros(4, 8))
    assert coverage.missing_of_tied([names]) == {}
