"""Child processes of tests. Every helper kills what it started, also when the test fails.

`running` starts any command. `forked` and `run_ranks` start functions at once: their processes are forks of a
server that has imported torch and sees no GPU. A fork of the test process could inherit a CUDA context
that it cannot use.
"""

import gc
import os
import signal
import subprocess
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

children = get_context("forkserver")
_modules = ["tests.server"]


def preload(module: str) -> None:
    """Have the server import a test module too; all test files share the one server."""
    _modules.append(module)
    children.set_forkserver_preload(_modules)


def default_signals() -> None:
    """Undo what background shells and nohup do to their jobs: child processes inherit ignored signals."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextmanager
def running(command: Sequence[str] | str, **options: Any) -> Iterator[subprocess.Popen]:
    """Start a command, such as torchrun, in a session of its own; at exit kill it and all its descendants.

    `options` are Popen's. Descendants are found by an environment variable: torchrun's workers have sessions
    of their own, and outlive torchrun.
    """
    tag = f"STARTED_BY_TEST={uuid.uuid4().hex}"
    name, value = tag.split("=")
    options = {"text": True, "start_new_session": True, "preexec_fn": default_signals} | options
    options["env"] = options.get("env", os.environ) | {name: value}
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            while pids := _processes_with(tag):
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _processes_with(variable: str) -> list[int]:
    pids = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it ended, or is another user's
            if f"{variable}\0".encode() in file.read_bytes():
                pids.append(int(file.parent.name))
    return pids


@contextmanager
def forked(work: Callable, *arguments: Any) -> Iterator[BaseProcess]:
    """Start `work(*arguments)` in a process without GPUs; at exit kill it and its process group."""
    child = children.Process(target=_work_in_child, args=(work, *arguments))
    child.start()
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()  # if it had no group of its own yet
        child.join()


def _work_in_child(work: Callable, *arguments: Any) -> None:
    os.setsid()
    gc.freeze()  # A collection would copy the server's memory, page by page.
    gc.enable()
    # A fork's first call here, or in a new thread, renews torch's pool: two threads at once would fail.
    torch.set_num_threads(torch.get_num_threads())
    default_signals()
    work(*arguments)


def run_ranks(work: Callable, folder: Path, *arguments: Any, world_size: int = 2) -> None:
    """Run `work(rank, folder, *arguments)` on `world_size` processes over gloo; fail if any of them does."""
    (folder / "store").unlink(missing_ok=True)
    with ExitStack() as stack:
        everyone = [
            stack.enter_context(forked(one_rank, work, rank, world_size, folder, arguments))
            for rank in range(world_size)
        ]
        waiting = everyone
        while waiting and not any(process.exitcode for process in everyone):  # else others wait in vain
            wait([process.sentinel for process in waiting], timeout=5)
            waiting = [process for process in waiting if process.is_alive()]
        codes = [process.exitcode for process in everyone]
    assert codes == [0] * world_size, "".join(path.read_text() for path in folder.glob("error.*"))


def one_rank(work: Callable, rank: int, world_size: int, folder: Path, arguments: tuple) -> None:
    store = f"file://{folder}/store"
    try:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
        work(rank, folder, *arguments)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"error.{rank}").write_text(traceback.format_exc())
        os._exit(1)  # without waiting for threads of a broken process group
