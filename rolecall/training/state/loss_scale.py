"""The loss scale, by which the loss is multiplied where a model computes in float16: gradients below 6e-8 would be
zeros there, and above 65,504 infinite (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).

It is a power of two, so that it changes no digit. Where gradients are infinite it is halved and the mini-batch computed
again, which costs a pass and no update; it is doubled after so many updates without.
"""

from collections.abc import Mapping

_EXPONENT = 16
"""The first scale's."""
_NUM_UPDATES = 400
"""Updates until it is doubled."""


class LossScale:
    """The loss scale of one model, the same on all ranks."""

    def __init__(self) -> None:
        self._exponent, self._age = _EXPONENT, 0
        self._before: int | None = None  # the exponent that the mini-batch at hand began with, once it was too large

    @property
    def value(self) -> float:
        """Number that the loss is multiplied by, and gradients are divided by."""
        return float(2**self._exponent)

    def applied(self) -> None:
        """An update was applied."""
        self._before = None
        self._age += 1
        if self._age == _NUM_UPDATES:
            self._exponent, self._age = self._exponent + 1, 0

    def overflowed(self) -> bool:
        """Gradients of a finite loss are not finite. True: they may be at the scale that it is now. False: not even
        unscaled, and the scale is what it was before this mini-batch.
        """
        if self._before is None:
            self._before = self._exponent
        if self._exponent:
            self._exponent, self._age = self._exponent - 1, 0
            return True
        self._exponent, self._before = self._before, None
        return False

    def counters(self) -> dict[str, int]:
        """Returns what a checkpoint keeps."""
        return {"loss_scale_exponent": self._exponent, "loss_scale_age": self._age}

    def restore(self, counters: Mapping[str, int]) -> None:
        """Goes on as the scale that `counters` were of; as a new one where they were of a model in another type."""
        self._exponent = counters.get("loss_scale_exponent", _EXPONENT)
        self._age = counters.get("loss_scale_age", 0)
        self._before = None
