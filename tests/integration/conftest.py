"""Fixtures of several files here."""

from pathlib import Path

import pytest

from tests.twins.run import light_run

__all__ = ["light_run"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense model, one of tied embeddings, and one of experts."""
    from tests.tiny_models import write_qwen3, write_qwen3_moe

    root = tmp_path_factory.mktemp("models")
    return {
        "dense": write_qwen3(root / "dense", vocab=288),
        "tied": write_qwen3(root / "tied", tied=True, vocab=288),
        "moe": write_qwen3_moe(root / "moe"),
    }
