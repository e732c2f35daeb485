"""A small model, and a clock that tests move."""

import json
import time
from collections.abc import Callable

import pytest
from fp8_suite.te_models.presets import PRESETS

HALF = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}  # emulated layers take half the time


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Callable[..., str]:
    """Return flags of tiny-llama with half its widths and other changes of its config."""

    def flags(**changes) -> str:
        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(json.dumps(PRESETS["tiny-llama"] | HALF | changes))
        return f"--model_name {folder} --tokenizer_name demo --init random"

    return flags


@pytest.fixture
def advance(monkeypatch) -> Callable[[float], None]:
    """Move a clock that otherwise stands still."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance
