"""A table of liars: services that each break one rule of a contract, and how each is made of the honest one."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Liars(Generic[T]):
    """The liars of a contract. Each method adds one, under the name of what it decorates."""

    def __init__(self, honest: Callable[[], T]) -> None:
        self.named: dict[str, tuple[str, Callable[[], T]]] = {}
        """Name of a liar -> the rule that it breaks, and how it is made."""
        self._honest = honest

    def being(self, rule: str, **made: float) -> Callable[[type[T]], type[T]]:
        """A liar of a class of its own, made with these arguments."""

        def add(kind: type[T]) -> type[T]:
            self.named[kind.__name__] = (rule, lambda: kind(**made))
            return kind

        return add

    def changing(self, rule: str, what: str) -> Callable[[Callable[..., None]], None]:
        """A liar whose messages are changed by the function, which becomes its attribute `what`."""

        def add(lie: Callable[..., None]) -> None:
            def make() -> T:
                liar = self._honest()
                setattr(liar, what, lie)
                return liar

            self.named[lie.__name__] = (rule, make)

        return add

    def describing(self, lie: Callable[[Any], None]) -> None:
        """A liar whose description (`spec`) is changed by the function and cannot be used."""

        def make() -> T:
            liar: Any = self._honest()
            lie(liar.spec)
            return liar  # type: ignore[no-any-return]

        self.named[lie.__name__] = ("describe.usable", make)
