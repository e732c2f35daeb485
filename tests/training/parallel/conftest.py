"""Runs that several tests compare with."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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


@pytest.fixture(scope="module")
def reference(once) -> Callable[[str], Path]:
    """A run on one rank with checkpoints, once for each set of flags."""
    return lambda flags: once(f"{flags} --save_interval 2")
