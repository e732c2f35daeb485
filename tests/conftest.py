"""Settings of all tests."""

import gc
import os
import signal
import tempfile

import pytest
from fp8_suite.core.machine import cores


def pytest_configure(config: pytest.Config) -> None:
    # Background shells ignore SIGINT for their jobs, and child processes inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["HF_UPDATE_DOWNLOAD_COUNTS"] = "0"  # datasets would send a request for each data set it opens
    # torch.compile would reuse code that it compiled for other CPU instructions (ATEN_CPU_CAPABILITY), which
    # computes NaN or aborts. Worker processes inherit the variable.
    os.environ["WANDB_MODE"] = "offline"
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="torchinductor_")
        config.add_cleanup(folder.cleanup)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name


def pytest_xdist_auto_num_workers() -> int:
    """One more than the cores: many tests wait for processes."""
    return len(cores()) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Load libraries without garbage collection, which would take a fifth of the time and free nothing.

    Later collections skip their million objects.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def wandb_offline(monkeypatch):
    """W&B as on a machine without network."""
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()  # settings are read once per process
    yield
    wandb.teardown()


@pytest.fixture(autouse=True, scope="session")
def _fast_bf16():
    """Multiply BF16 matrices in FP32 on a CPU without BF16 instructions, as training does."""
    from fp8_suite.te_models.kernels.bf16_on_cpu import fast_bf16  # imports torch

    with fast_bf16():
        yield
