"""The processes of a job, one per device: who they are, and what they agree on.

Every function works without a process group too, as the one rank of a world of one.
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

from core.machine import cores
from core.redact import redact

T = TypeVar("T")

_stores: list[dist.Store] = []  # the one that this process joined a job with

# Timeout of every collective: longer than any limit of the watchdog, whose message says more than NCCL's.
PATIENCE = timedelta(days=8)
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Environment variables in which launchers give the number of processes; Slurm's counts a step's.
STARTED = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def refuse_several(why: str, instead: str) -> None:
    """ValueError where a launcher started several processes: each would train a run of its own."""
    for name in STARTED:
        if (count := os.environ.get(name)) not in (None, "", "0", "1"):
            raise ValueError(f"{name}={count}: {why}, and each process would run alone; use {instead}")


def one_device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def join(timeout_minutes: float) -> torch.device:
    """Join the job that torchrun started and return this rank's device.

    The launcher's MASTER_ADDR and MASTER_PORT are used as they are. ValueError where a node has more ranks
    than GPUs, RuntimeError if the others do not come.
    """
    local_rank, local_size = local_rank_and_size()
    if torch.cuda.is_available():
        if local_size > torch.cuda.device_count():
            raise ValueError(
                f"--nproc_per_node {local_size}: {platform.node()} has {torch.cuda.device_count()} GPUs; "
                "start one rank per GPU"
            )
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    patience = timedelta(minutes=timeout_minutes) + timedelta(seconds=30)

    def late(missing: Any) -> RuntimeError:
        return RuntimeError(
            f"--timeout_minutes {timeout_minutes:g}: {missing} did not come within {patience}; see "
            "what they printed"
        )

    try:
        store, number, size = next(dist.rendezvous("env://", timeout=patience))
    except dist.DistError:
        raise late("the other ranks") from None
    try:
        name = agree_on_start(store, number, size, patience, device_type=device.type)
        store = dist.PrefixStore(name, store)
    except TimeoutError as missing:
        raise late(missing) from None
    except dist.DistError:
        host = ":".join(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise RuntimeError(
            f"the job's store ({host}) is gone, and maybe its node; see what that printed"
        ) from None
    _stores[:] = [store]
    dist.init_process_group(
        backend,
        store=store,
        rank=number,
        world_size=size,
        timeout=PATIENCE,
        device_id=device if device.type == "cuda" else None,
    )
    return device


def agree_on_start(
    store: dist.Store, number: int, size: int, timeout: timedelta, *, device_type: str = "cpu"
) -> str:
    """A name that all ranks share and that no earlier start of them used.

    torchrun --max_restarts keeps its store, where new ranks would find the addresses of dead ones, and each
    node counts restarts on its own (https://github.com/pytorch/pytorch/issues/135712). So rank 0 makes a
    name, and the others take one only from a rank 0 that knows of them.
    TimeoutError names those that did not come; the error of one that will not is raised here, too.
    RuntimeError where some have a GPU and others do not: these would wait for each other for ever.
    """
    own = f"{uuid.uuid4().hex} {device_type} {platform.node()}"
    deadline = time.monotonic() + timeout.total_seconds()

    def wait() -> bool:
        """A while; False once it has been too long."""
        if store.check([_failure()]):
            bad_setting, message = json.loads(store.get(_failure()))
            raise (ValueError if bad_setting else RuntimeError)(message)
        time.sleep(0.05)
        return time.monotonic() < deadline

    if number == 0:
        store.set("start", own)
        keys = {other: f"{own}/{other}" for other in range(1, size)}
        while keys and not store.check(list(keys.values())):
            if not wait():
                missing = [str(other) for other, key in keys.items() if not store.check([key])]
                raise TimeoutError(f"ranks {', '.join(missing)} of {size}")
        known = [store.get(key).decode() for key in keys.values()]
        _refuse_mixed([own, *known])
        store.set(f"{own}/known", json.dumps(known))
        return own
    while wait():
        if not store.check(["start"]):
            continue
        name = store.get("start").decode()
        store.set(f"{name}/{number}", own)
        if store.check([f"{name}/known"]) and own in json.loads(store.get(f"{name}/known")):
            return name
    raise RuntimeError(f"rank 0 does not answer rank {number} ({platform.node()}); start the job again")


def _refuse_mixed(started: list[str]) -> None:
    """RuntimeError where some ranks have a GPU and others see none; `started`: what each said of itself."""
    found = [said.split(" ", 2)[1:] for said in started]
    without = [f"{number} ({host})" for number, (kind, host) in enumerate(found) if kind == "cpu"]
    if 0 < len(without) < len(found):
        raise RuntimeError(
            f"ranks {', '.join(without)} see no GPU, the others do: look at nvidia-smi and "
            "CUDA_VISIBLE_DEVICES there"
        )


def _failure() -> str:
    """Where the store has why a rank of this start will not come."""
    return f"failure/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def will_not_come(message: str, *, bad_setting: bool) -> None:
    """Tell the ranks that wait for this one to join why it ends; no more than a try."""
    if not under_torchrun() or _stores:
        return
    with suppress(Exception):
        store, number, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=5)))
        if not store.check([_failure()]):  # of several, the first
            text = f"rank {number} ({platform.node()}): {message}"
            store.set(_failure(), json.dumps([bad_setting, text]))
            if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
                time.sleep(1.0)  # to be heard: the store may be of this node, and end with its ranks


def raise_process_group_timeouts() -> None:
    """The default group's timeout for all groups: torch gives those that libraries make 30 minutes."""
    for group in c10d._world.pg_map if dist.is_initialized() else ():
        c10d._set_pg_timeout(PATIENCE, group)


def connection() -> dist.Store:
    """A connection to the job's store, for a thread of its own: another may be held by a rank that waits."""
    return _stores[0].clone()


def leave(close: Callable[[], None]) -> None:
    """The orderly end: no rank goes while another may still wait for it; `close` what watched over them."""
    if dist.is_initialized():
        dist.barrier()
        close()
        dist.destroy_process_group()


def under_torchrun() -> bool:
    return all(name in os.environ for name in TORCHRUN)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def local_rank_and_size() -> tuple[int, int]:
    """This rank's number on its node, and the ranks there."""
    if not under_torchrun():
        return 0, 1
    return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


def use_cores() -> int:
    """Let this rank's CPU kernels use its share of the cores; how many threads that makes. Collective.

    torchrun sets OMP_NUM_THREADS=1 where it is not set, and an optimizer on the CPU would step on one core.
    Another number is the user's. Ranks that a launcher has bound to cores of their own share them with none.
    """
    own = cores()
    sharing = gather((platform.node(), own)).count((platform.node(), own))
    if under_torchrun() and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(1, len(own) // sharing))
    return torch.get_num_threads()


def num_nodes() -> int:
    return int(os.environ.get("GROUP_WORLD_SIZE", 1)) if dist.is_initialized() else 1


def all_sum(tensor: Tensor) -> Tensor:
    """Sum over ranks; `tensor` itself stays as it is."""
    return _reduce(tensor, dist.ReduceOp.SUM)


def all_max(tensor: Tensor) -> Tensor:
    """Maximum over ranks; `tensor` itself stays as it is."""
    return _reduce(tensor, dist.ReduceOp.MAX)


def _reduce(tensor: Tensor, operation: Any) -> Tensor:
    if world_size() == 1:
        return tensor
    total = tensor.clone()
    dist.all_reduce(total, op=operation)
    return total


def gather(value: T) -> list[T]:
    """Every rank's picklable `value`, in rank order, on every rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def run_on_all_ranks(work: Callable[[], T]) -> list[T]:
    """Run `work` on every rank: all results in rank order, or one failing rank's error on every rank.

    An error carries `ranks`, {rank: host} of those that failed, and `origin` and `details`, the file that
    raised it and the traceback there. For work without collectives of its own.
    """
    own: Exception | None = None
    result = raised = None
    try:
        result = work()
    except Exception as error:
        own = error
        origin = traceback.extract_tb(error.__traceback__)[-1].filename
        raised = _portable(error), origin, "".join(traceback.format_exception(error))
    outcomes = gather((result, raised, platform.node()))
    failed = {number: host for number, (_, raised, host) in enumerate(outcomes) if raised is not None}
    if failed:
        error, origin, details = outcomes[min(failed)][1]
        error = own or error  # its own has the traceback
        error.ranks, error.origin, error.details = failed, origin, details
        try:
            raise error
        finally:
            # Or the traceback would keep alive what `work` held, such as a lock.
            del error, own, outcomes, raised
    return [result for result, *_ in outcomes]


def run_on_rank0(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 while the others wait; its result or error on every rank."""
    return run_on_all_ranks(lambda: work() if rank() == 0 else None)[0]


def iterate_on_rank0(items: Iterator[Any], work: Callable[[Iterator[Any]], T]) -> T:
    """`work(items)` on rank 0; making an item is collective, so every rank goes through all of them."""

    def go() -> T | None:
        try:
            return work(items) if rank() == 0 else None
        finally:
            for _ in items:
                pass

    return run_on_all_ranks(go)[0]


def print_rank0(text: str) -> None:
    """Print once, on rank 0, without secrets."""
    if rank() == 0:
        print(redact(text), flush=True)


def agree(what: str, values: dict[str, Any]) -> None:
    """ValueError if `values` are not the same on every rank: they would train different models, or hang."""
    everyone = gather((platform.node(), values))
    _, first = everyone[0]
    for number, (host, own) in enumerate(everyone):
        if differing := [key for key in first | own if own.get(key) != first.get(key)]:
            shown = ", ".join(f"{key} {own.get(key)} (rank 0: {first.get(key)})" for key in differing)
            error = ValueError(
                f"{what} differ on rank {number} ({host}): {shown}; start every rank with the same command, "
                "environment and data"
            )
            error.ranks = {n: name for n, (name, _) in enumerate(everyone)}
            raise error


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
