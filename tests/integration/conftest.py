"""Fixtures of several files here."""

from tests.twins.run import light_run

__all__ = ["light_run"]
