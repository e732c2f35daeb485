"""Settings of all tests."""

import signal

import pytest


def pytest_configure() -> None:
    """Undo that background shells ignore SIGINT for their jobs: child processes inherit it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _fast_bf16():
    """Multiply BF16 matrices in FP32 on a CPU without BF16 instructions, as training does."""
    from core.cpu import fast_bf16  # imports torch

    with fast_bf16():
        yield
