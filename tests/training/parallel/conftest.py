"""Runs that several tests compare with, and their models."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fp8_suite.te_models.presets import PRESETS

from tests.training.parallel import jobs


@pytest.fixture(scope="module", autouse=True)
def no_process_left() -> Iterator[None]:
    yield
    jobs.children.close()


@pytest.fixture(scope="module")
def once(tmp_path_factory) -> Callable[..., Path]:
    """Return the folder of a run, trained once for each set of flags."""
    done: dict[str, Path] = {}

    def run_once(flags: str, *, ranks: int = 1) -> Path:
        if flags not in done:
            done[flags] = jobs.train(tmp_path_factory.mktemp("runs") / "run", flags, ranks=ranks).folder
        return done[flags]

    return run_once


HALF = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}  # emulated layers take half the time


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Callable[..., str]:
    """Return flags of tiny-llama with half its widths and other changes of its config."""

    def flags(**changes) -> str:
        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(json.dumps(PRESETS["tiny-llama"] | HALF | changes))
        return f"--model_name {folder} --tokenizer_name demo --init random"

    return flags


@pytest.fixture(scope="module")
def reference(once) -> Callable[[str], Path]:
    """A run on one rank with checkpoints, once for each set of flags."""
    return lambda flags: once(f"{flags} --save_interval 2")
