"""Settings of all tests."""

import gc
import signal

import pytest


def pytest_configure() -> None:
    """Undo that background shells ignore SIGINT for their jobs: child processes inherit it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.fixture(autouse=True, scope="session")
def _fast_bf16():
    """Multiply BF16 matrices in FP32 on a CPU without BF16 instructions, as training does."""
    from core.bf16_on_cpu import fast_bf16  # imports torch

    with fast_bf16():
        yield
