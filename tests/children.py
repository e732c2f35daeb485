"""Processes for tests that start at once: forked by a server that has imported torch and never saw a GPU.

A fork of the test process would start as fast, but could inherit a CUDA context that it cannot use.
"""

from multiprocessing import get_context

children = get_context("forkserver")
_modules: list[str] = []


def preload(module: str) -> None:
    """Have the server import a test module too; all test files share the one server."""
    _modules.append(module)
    children.set_forkserver_preload(_modules)
