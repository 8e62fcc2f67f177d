"""When the loss scale rises and falls."""

from rolecall.training.state.loss_scale import LossScale


def test_it_falls_until_gradients_are_finite_and_rises_after_many_updates() -> None:
    scale = LossScale()
    assert scale.value == 2.0**16
    assert [scale.overflowed() for _ in range(3)] == [True] * 3
    for _ in range(399):
        scale.applied()
    assert scale.value == 2.0**13
    scale.applied()
    assert scale.value == 2.0**14
    for _ in range(399):
        scale.applied()
    assert scale.overflowed()  # and 400 are counted from here
    for _ in range(399):
        scale.applied()
    assert scale.value == 2.0**13


def test_gradients_that_are_not_finite_at_any_scale_leave_it_as_it_was() -> None:
    scale = LossScale()
    assert [scale.overflowed() for _ in range(17)] == [True] * 16 + [False]
    assert scale.value == 2.0**16


def test_a_checkpoint_goes_on_with_it() -> None:
    scale, restored = LossScale(), LossScale()
    scale.overflowed()
    for _ in range(398):
        scale.applied()
    restored.restore(scale.counters())
    for each in (scale, restored):
        each.applied()
        assert each.value == 2.0**15
        each.applied()
        assert each.value == 2.0**16
