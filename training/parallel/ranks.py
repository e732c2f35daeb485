"""Ranks of a job, one process per device: start and end of the process group, and exchange of Python objects.

Without a process group all functions behave as in a world of one rank.
"""

from __future__ import annotations

import json
import os
import pickle
import platform
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from fp8_suite.core.errors import EXIT_BAD_SETTING, EXIT_FAILED, UserError, bad_setting, first_line
from fp8_suite.core.redact import redact
from torch.distributed import distributed_c10d as c10d

T = TypeVar("T")

# Longer than any limit of the watchdog, so that the watchdog, which names the rank at fault, ends a stalled
# job before NCCL does.
COLLECTIVE_TIMEOUT = timedelta(days=8)
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Environment variables in which torchrun, Slurm (srun), Open MPI and MPICH set the number of processes.
PROCESS_COUNTS = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

_stores: list[dist.Store] = []  # the job's store, once this process has joined


# This rank


def under_torchrun() -> bool:
    """True if the launcher has set torchrun's environment variables."""
    return all(name in os.environ for name in TORCHRUN)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def local_rank_and_size() -> tuple[int, int]:
    """Return this rank's number on its node, and the number of ranks on the node."""
    if not under_torchrun():
        return 0, 1
    return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


def num_nodes() -> int:
    return int(os.environ.get("GROUP_WORLD_SIZE", 1)) if dist.is_initialized() else 1


# Start and end of the process group


def refuse_several(why: str, instead: str) -> None:
    """Raise UserError if a launcher has started several processes: each would train the whole run."""
    for name in PROCESS_COUNTS:
        if (count := os.environ.get(name)) not in (None, "", "0", "1"):
            reason = f"{name}={count}: {why}, so each process would train the whole run alone; use {instead}"
            raise UserError(reason, exit_code=EXIT_BAD_SETTING)


def one_device() -> torch.device:
    """Return the first GPU, or the CPU without one."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def join(timeout_minutes: float) -> torch.device:
    """Initialize the process group of a torchrun job and return this rank's device."""
    # TE, DeepSpeed and this suite use names of collectives that torch 2.13 deprecates: a warning for each.
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.*deprecated")
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        local_rank, local_size = local_rank_and_size()
        if local_size > (gpus := torch.cuda.device_count()):
            raise bad_setting(
                f"{platform.node()} has {gpus} GPUs; start one rank per GPU", nproc_per_node=local_size
            )
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    timeout = timedelta(minutes=timeout_minutes, seconds=30)
    try:
        store, number, size = next(dist.rendezvous("env://", timeout=timeout))
        name = agree_on_start(store, number, size, timeout, device_type=device.type)
    except dist.DistError as error:
        address = ":".join(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise UserError(
            f"--timeout_minutes {timeout_minutes:g}: the job's store ({address}) does not respond, or not "
            f"all ranks joined ({first_line(error)}); check the output of the other ranks"
        ) from None
    _stores[:] = [dist.PrefixStore(name, store)]
    dist.init_process_group(
        backend,
        store=_stores[0],
        rank=number,
        world_size=size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    return device


def agree_on_start(
    store: dist.Store, number: int, size: int, timeout: timedelta, *, device_type: str = "cpu"
) -> str:
    """Return a name for this start of the job, the same on all ranks and different from all earlier starts.

    The name becomes a prefix of the store's keys: torchrun --max_restarts keeps its store, with addresses of
    dead ranks, and each node counts restarts on its own (https://github.com/pytorch/pytorch/issues/135712).
    Rank 0 draws the name. The name in the store may be an old one, so the others wait for rank 0's reply.

    Raise UserError if a rank cannot start or does not join within `timeout`, or if only some ranks have a
    GPU, because NCCL would hang.
    """
    me = f"{uuid.uuid4().hex} {device_type} {platform.node()}"
    replies = {n: f"{me}/{n}" for n in range(1, size)}  # keys of their replies to rank 0
    if number == 0:
        store.set("start", me)
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        if store.check([_failure_key()]):
            exit_code, message = json.loads(store.get(_failure_key()))
            raise UserError(message, exit_code=exit_code)
        if number > 0 and store.check(["start"]):
            store.set(f"{store.get('start').decode()}/{number}", me)
            if store.check([me]):
                return store.get(me).decode()
        if number == 0 and (not replies or store.check(list(replies.values()))):
            members = [me, *(store.get(key).decode() for key in replies.values())]
            _refuse_mixed_devices(members)
            for member in members:
                store.set(member, me)
            return me
        time.sleep(0.05)
    if number > 0:
        raise UserError(f"rank {number} ({platform.node()}) gets no reply from rank 0; start the job again")
    missing = ", ".join(str(n) for n, key in replies.items() if not store.check([key]))
    raise UserError(
        f"ranks {missing} of {size} did not join within {timeout} (--timeout_minutes and 30 s); check their "
        "output"
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
    """Send an error to the ranks that wait for this one to join. Errors in sending are ignored."""
    if not under_torchrun() or _stores:
        return
    with suppress(Exception):
        store, number, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=5)))
        message = f"rank {number} ({platform.node()}): {message}"
        store.compare_set(_failure_key(), "", json.dumps([exit_code, message]))  # keeps an earlier failure
        if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
            # The store may be on this node and end with its ranks: ranks of other nodes need time to read it.
            time.sleep(1.0)


def leave(close: Callable[[], None]) -> None:
    """Wait for all ranks, then call `close` and destroy the process group."""
    if dist.is_initialized():
        dist.barrier()
        close()
        dist.destroy_process_group()


def connection() -> dist.Store:
    """Open a separate connection to the job's store for another thread, as a wait blocks a connection."""
    return _stores[0].clone()


def raise_process_group_timeouts() -> None:
    """Set the timeout of all process groups, also of those that libraries created with torch's 30 minutes."""
    for group in c10d._world.pg_map if dist.is_initialized() else ():
        c10d._set_pg_timeout(COLLECTIVE_TIMEOUT, group)


# Exchange of Python objects


def gather(value: T) -> list[T]:
    """Return the values of all ranks, in rank order, on every rank. `value` must be picklable."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def run_on_all_ranks(work: Callable[[], T]) -> list[T]:
    """Run `work` on every rank. Return all results in rank order, or raise an error on all ranks.

    A rank that failed raises its own error, the others that of the first rank that failed. The error gets two
    attributes: `ranks`, {rank: host} of all ranks that failed, and `details`, the first rank's traceback.
    `work` must not contain collectives.
    """
    local_error = result = failure = None
    try:
        result = work()
    except Exception as error:
        local_error, failure = error, (_portable(error), "".join(traceback.format_exception(error)))
    outcomes = gather((result, failure, platform.node()))
    failed = {number: host for number, (_, failure, host) in enumerate(outcomes) if failure}
    if not failed:
        return [result for result, *_ in outcomes]
    first_error, details = outcomes[min(failed)][1]
    error = local_error or first_error
    error.ranks, error.details = failed, details
    try:
        raise error
    finally:
        # The traceback refers to this frame, which would keep alive what `work` holds, such as a file lock.
        del error, local_error, first_error, outcomes, failure


def _portable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError with its message if it cannot be pickled."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def run_on_rank0(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 while the others wait. Return its result, or raise its error, on every rank."""
    return run_on_all_ranks(lambda: work() if rank() == 0 else None)[0]


def iterate_on_rank0(items: Iterator[Any], work: Callable[[Iterator[Any]], T]) -> T:
    """Run `work(items)` on rank 0 and return its result on every rank.

    Producing an item is collective, so every rank iterates over all items, also if `work` fails.
    """

    def consume() -> T | None:
        try:
            return work(items) if rank() == 0 else None
        finally:
            for _ in items:
                pass

    return run_on_all_ranks(consume)[0]


def print_rank0(text: str) -> None:
    """Print `text` on rank 0, with secrets redacted."""
    if rank() == 0:
        print(redact(text), flush=True)


def agree(what: str, values: dict[str, Any]) -> None:
    """Raise UserError if `values` differ between ranks, which would train different models or hang."""
    gathered = gather((platform.node(), values))
    _, expected = gathered[0]
    for number, (host, values) in enumerate(gathered):
        if differing := [key for key in expected | values if values.get(key) != expected.get(key)]:
            shown = ", ".join(f"{key} {values.get(key)} (rank 0: {expected.get(key)})" for key in differing)
            error = UserError(
                f"{what} differ on rank {number} ({host}): {shown}; start every rank with the same command, "
                "environment and data",
                exit_code=EXIT_BAD_SETTING,
            )
            error.ranks = {n: name for n, (name, _) in enumerate(gathered)}
            raise error
