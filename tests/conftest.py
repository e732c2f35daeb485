"""Settings of all tests."""

import signal


def pytest_configure() -> None:
    """Undo that background shells ignore SIGINT for their jobs: child processes inherit it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
