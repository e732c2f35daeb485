"""The ranks of a job, one process per device: joining it, and exchanges of Python objects.

Every function also works without a process group, in a world of one rank.
"""

from __future__ import annotations

import json
import os
import pickle
import platform
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from core.errors import EXIT_BAD_SETTING, EXIT_FAILED, UserError, bad_setting, first_line
from core.machine import cores
from core.redact import redact

T = TypeVar("T")

# Timeout of every collective: longer than any of the watchdog's, whose message is more useful than NCCL's.
PATIENCE = timedelta(days=8)
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Environment variables in which launchers set the number of processes; Slurm's counts those of a step.
PROCESS_COUNTS = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

_stores: list[dist.Store] = []  # the store with which this process joined a job


# This rank


def under_torchrun() -> bool:
    return all(name in os.environ for name in TORCHRUN)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def local_rank_and_size() -> tuple[int, int]:
    """Return this rank's number on its node, and the number of ranks there."""
    if not under_torchrun():
        return 0, 1
    return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


def num_nodes() -> int:
    return int(os.environ.get("GROUP_WORLD_SIZE", 1)) if dist.is_initialized() else 1


def use_cores() -> int:
    """Let this rank's CPU kernels use its share of the cores; return the number of threads. Collective.

    torchrun sets OMP_NUM_THREADS=1 if it is unset, and an optimizer on the CPU would step on one core.
    Another number is the user's. Ranks that a launcher has bound to different cores do not share them.
    """
    mine = (platform.node(), cores())
    sharing = gather(mine).count(mine)
    if under_torchrun() and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(1, len(mine[1]) // sharing))
    return torch.get_num_threads()


# Joining and leaving a job


def refuse_several(why: str, instead: str) -> None:
    """Refuse several processes of a launcher without a job: each would train a run of its own."""
    for name in PROCESS_COUNTS:
        if (count := os.environ.get(name)) not in (None, "", "0", "1"):
            reason = f"{name}={count}: {why}, and each process would run alone; use {instead}"
            raise UserError(reason, exit_code=EXIT_BAD_SETTING)


def one_device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def join(timeout_minutes: float) -> torch.device:
    """Join the job that torchrun started and return this rank's device."""
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        local_rank, local_size = local_rank_and_size()
        if local_size > (gpus := torch.cuda.device_count()):
            raise bad_setting(
                f"{platform.node()} has {gpus} GPUs; start one rank per GPU", nproc_per_node=local_size
            )
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    patience = timedelta(minutes=timeout_minutes, seconds=30)
    try:
        store, number, size = next(dist.rendezvous("env://", timeout=patience))
        name = agree_on_start(store, number, size, patience, device_type=device.type)
    except dist.DistError as error:
        address = ":".join(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise UserError(
            f"--timeout_minutes {timeout_minutes:g}: the job's store ({address}) is gone, or not all ranks "
            f"joined ({first_line(error)}); check their output"
        ) from None
    _stores[:] = [dist.PrefixStore(name, store)]
    dist.init_process_group(
        backend,
        store=_stores[0],
        rank=number,
        world_size=size,
        timeout=PATIENCE,
        device_id=device if device.type == "cuda" else None,
    )
    return device


def agree_on_start(
    store: dist.Store, number: int, size: int, patience: timedelta, *, device_type: str = "cpu"
) -> str:
    """Return a name that all ranks share and no earlier start of them used. UserError names missing ranks.

    torchrun --max_restarts keeps its store, in which new ranks would find the addresses of dead ones, and
    every node counts restarts on its own (https://github.com/pytorch/pytorch/issues/135712). Therefore rank 0
    draws a name, and the others only accept it once rank 0 has answered them. A rank that failed before it
    could join ends the others, as do ranks without a GPU among ranks with one, which would hang.
    """
    me = f"{uuid.uuid4().hex} {device_type} {platform.node()}"
    others = {other: f"{me}/{other}" for other in range(1, size)}  # keys under which they answer rank 0
    if number == 0:
        store.set("start", me)
    deadline = time.monotonic() + patience.total_seconds()
    while time.monotonic() < deadline:
        if store.check([_failure_key()]):
            exit_code, message = json.loads(store.get(_failure_key()))
            raise UserError(message, exit_code=exit_code)
        if number > 0 and store.check(["start"]):
            store.set(f"{store.get('start').decode()}/{number}", me)
            if store.check([me]):
                return store.get(me).decode()
        if number == 0 and (not others or store.check(list(others.values()))):
            members = [me, *(store.get(key).decode() for key in others.values())]
            _refuse_mixed_devices(members)
            for member in members:
                store.set(member, me)
            return me
        time.sleep(0.05)
    if number > 0:
        raise UserError(f"rank 0 does not answer rank {number} ({platform.node()}); start the job again")
    missing = ", ".join(str(other) for other, key in others.items() if not store.check([key]))
    raise UserError(
        f"timed out after {patience} (--timeout_minutes and 30 s) waiting for ranks {missing} of {size} to "
        "join; check their output"
    )


def _refuse_mixed_devices(members: list[str]) -> None:
    kinds = [member.split(" ", 2)[1:] for member in members]
    without = [f"{number} ({host})" for number, (kind, host) in enumerate(kinds) if kind == "cpu"]
    if 0 < len(without) < len(kinds):
        raise UserError(
            f"ranks {', '.join(without)} see no GPU, the others do: check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES there"
        )


def _failure_key() -> str:
    return f"failure/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def report_failed_start(message: str, exit_code: int = EXIT_FAILED) -> None:
    """Send an error to the ranks that wait for this one to join; best effort."""
    if not under_torchrun() or _stores:
        return
    with suppress(Exception):
        store, number, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=5)))
        message = f"rank {number} ({platform.node()}): {message}"
        # The first of several failures is kept.
        store.compare_set(_failure_key(), "", json.dumps([exit_code, message]))
        if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
            time.sleep(1.0)  # the store may live on this node, and end with its ranks


def leave(close: Callable[[], None]) -> None:
    """End in order: no rank exits while another may wait for it. `close` stops the watchdog."""
    if dist.is_initialized():
        dist.barrier()
        close()
        dist.destroy_process_group()


def connection() -> dist.Store:
    """Open a connection to the job's store for another thread: this one's may be blocked by a wait."""
    return _stores[0].clone()


def raise_process_group_timeouts() -> None:
    """Give every process group `PATIENCE`: torch gives those that libraries create 30 minutes."""
    for group in c10d._world.pg_map if dist.is_initialized() else ():
        c10d._set_pg_timeout(PATIENCE, group)


# Exchange


def all_sum(tensor: Tensor) -> Tensor:
    """Return the sum over ranks; `tensor` is unchanged."""
    return _reduce(tensor, dist.ReduceOp.SUM)


def all_max(tensor: Tensor) -> Tensor:
    """Return the maximum over ranks; `tensor` is unchanged."""
    return _reduce(tensor, dist.ReduceOp.MAX)


def _reduce(tensor: Tensor, operation: Any) -> Tensor:
    if world_size() == 1:
        return tensor
    total = tensor.clone()
    dist.all_reduce(total, op=operation)
    return total


def gather(value: T) -> list[T]:
    """Return every rank's picklable `value`, in rank order, on every rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def run_on_all_ranks(work: Callable[[], T]) -> list[T]:
    """Run `work` on every rank; return all results in rank order, or raise one rank's error on all ranks.

    The error carries `ranks`, {rank: host} of those that failed, and `details`, the traceback of the first.
    `work` must not contain collectives.
    """
    own = result = failure = None
    try:
        result = work()
    except Exception as error:
        own, failure = error, (_portable(error), "".join(traceback.format_exception(error)))
    outcomes = gather((result, failure, platform.node()))
    failed = {number: host for number, (_, failure, host) in enumerate(outcomes) if failure}
    if not failed:
        return [result for result, *_ in outcomes]
    error, details = outcomes[min(failed)][1]
    error = own or error  # its own has the traceback
    error.ranks, error.details = failed, details
    try:
        raise error
    finally:
        del error, own, outcomes, failure  # else its traceback keeps alive what `work` held, such as a lock


def _portable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError with its text if it cannot be pickled."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def run_on_rank0(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 while the others wait; return its result, or raise its error, on every rank."""
    return run_on_all_ranks(lambda: work() if rank() == 0 else None)[0]


def iterate_on_rank0(items: Iterator[Any], work: Callable[[Iterator[Any]], T]) -> T:
    """Run `work(items)` on rank 0. Producing an item is collective, so every rank iterates over all items."""

    def consume() -> T | None:
        try:
            return work(items) if rank() == 0 else None
        finally:
            for _ in items:
                pass

    return run_on_all_ranks(consume)[0]


def print_rank0(text: str) -> None:
    """Print once, on rank 0, without secrets."""
    if rank() == 0:
        print(redact(text), flush=True)


def agree(what: str, values: dict[str, Any]) -> None:
    """Refuse `values` that differ between ranks, which would train different models or hang."""
    everyone = gather((platform.node(), values))
    _, first = everyone[0]
    for number, (host, own) in enumerate(everyone):
        if differing := [key for key in first | own if own.get(key) != first.get(key)]:
            shown = ", ".join(f"{key} {own.get(key)} (rank 0: {first.get(key)})" for key in differing)
            error = UserError(
                f"{what} differ on rank {number} ({host}): {shown}; start every rank with the same command, "
                "environment and data",
                exit_code=EXIT_BAD_SETTING,
            )
            error.ranks = {n: name for n, (name, _) in enumerate(everyone)}
            raise error
