"""The service's half of controller fencing: the highest ctl seen, below which calls that change state are refused."""

from rolecall.errors import FencedError


class Fence:
    """The highest ctl seen. It starts from the store's, so that a restarted service does not obey a controller that was
    replaced before.
    """

    def __init__(self, ctl: int) -> None:
        self.ctl = ctl
        """Highest number seen."""

    def check(self, ctl: int) -> None:
        """Takes note of `ctl`. FencedError when a newer controller has called before."""
        if ctl < self.ctl:
            raise FencedError(
                f"controller {ctl} was replaced by controller {self.ctl}; only the newest may call", ctl=str(self.ctl)
            )
        self.ctl = ctl
