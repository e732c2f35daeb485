"""Processes for tests that start at once: forked by a server that has imported torch and never saw a GPU.

A fork of the test process would start as fast, but could inherit a CUDA context that it cannot use.
"""

import os
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

children = get_context("forkserver")
_modules: list[str] = []


def preload(module: str) -> None:
    """Have the server import a test module too; all test files share the one server."""
    _modules.append(module)
    children.set_forkserver_preload(_modules)


def start(work: Callable, *arguments) -> BaseProcess:
    child = children.Process(target=without_gpus, args=(work, *arguments))
    child.start()
    return child


def without_gpus(work: Callable, *arguments) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what is tested here needs none, and they take seconds to wake
    work(*arguments)


def run_ranks(work: Callable, folder: Path, *arguments, world_size: int = 2) -> None:
    """Run `work(rank, folder, *arguments)` on that many processes over gloo; the test fails with any."""
    (folder / "store").unlink(missing_ok=True)
    ranks = [start(one_rank, work, rank, world_size, folder, arguments) for rank in range(world_size)]
    for process in ranks:
        process.join(60)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
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
