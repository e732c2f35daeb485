"""Execute many small runs in the same processes, because starting processes takes longer than a run.

Usage, with or without torchrun: many_runs.py FILE. FILE contains a JSON object of run names and flags. Next
to the run folder NAME, NAME.ranks.json records the state of each rank after the run. With SHARE_GPU=1 all
ranks run on the first GPU and communicate through Gloo, because NCCL refuses two ranks on one GPU.
"""

import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from fp8_suite.training import run as run_module
from fp8_suite.training.assembly import assemble
from fp8_suite.training.config import parse_config
from fp8_suite.training.parallel import ranks
from fp8_suite.training.parallel.watchdog import Watchdog
from fp8_suite.training.prepare import prepare
from fp8_suite.training.restore import restore
from torch.distributed.pipelining import schedules


def fingerprint(tensors: dict[str, torch.Tensor]) -> float:
    return sum(t.double().sum().item() * (i + 1) for i, t in enumerate(tensors.values()))


def execute(name: str, flags: str, folder: Path, device: torch.device, watchdog: Watchdog) -> None:
    argv = [*shlex.split(flags), "--output_dir", str(folder / name)]
    cfg = parse_config(argv, prog="many_runs.py", description="")
    torch.cuda.reset_peak_memory_stats()
    built, restored = [], []
    with ExitStack() as cleanup, ExitStack() as signals:
        prepared, loaders = prepare(cfg, device, watchdog, time.perf_counter(), cleanup)
        run_module.assemble = lambda *args: built.append(assemble(*args)) or built[-1]
        run_module.restore = lambda *args: restored.append(restore(*args)) or restored[-1]
        code = run_module.run(prepared, loaders, cleanup, signals)
    model = built[0].model
    state = {"code": code, "scaling": fingerprint(restored[0][1].state())}
    state["fp8_weights"] = sum(len(getattr(m, "_fp8_workspaces", ())) for m in model.modules())
    state["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    states = ranks.gather(state)
    if ranks.rank() == 0:
        (folder / f"{name}.ranks.json").write_text(json.dumps(states))


class ThroughHost:
    """A transfer between two ranks of a tensor on the GPU, which Gloo moves in host memory only."""

    def __init__(self, transfer: Callable, tensor: torch.Tensor, **peer: Any):
        self.tensor, self.receives = tensor.detach(), "src" in peer or "group_src" in peer
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype) if self.receives else self.tensor.cpu()
        self.work = transfer(self.host, **peer)

    def wait(self) -> None:
        if self.work is not None and not isinstance(self.work, int):
            self.work.wait()
        if self.receives:
            self.tensor.copy_(self.host)


def send_through_host() -> None:
    """Let pipelines run through Gloo."""

    def batch(ops: list[dist.P2POp], desc: str | None = None) -> list[ThroughHost]:
        peers = ("group_dst" if op.op is dist.isend else "group_src" for op in ops)
        return [
            ThroughHost(op.op, op.tensor, group=op.group, **{peer: op.group_peer})
            for op, peer in zip(ops, peers, strict=True)
        ]

    def blocking(transfer: Callable) -> Callable:
        return lambda tensor, **peer: ThroughHost(transfer, tensor, **peer).wait()

    schedules._batch_p2p = batch
    dist.send, dist.recv = blocking(dist.send), blocking(dist.recv)


def join_on_one_gpu() -> torch.device:
    """Join torchrun's job with all ranks on the first GPU."""
    send_through_host()
    initialize = dist.init_process_group

    def with_gloo(backend: str, *, device_id: torch.device | None, **arguments) -> None:
        initialize(backend.replace("nccl", "gloo"), **arguments)

    on_first_gpu = patch.object(ranks, "local_rank_and_size", lambda: (0, 1))
    with patch.object(dist, "init_process_group", with_gloo), on_first_gpu:
        return ranks.join(5.0)


def main() -> None:
    path = Path(sys.argv[1])
    join = join_on_one_gpu if os.environ.get("SHARE_GPU") else lambda: ranks.join(5.0)
    device = join() if ranks.under_torchrun() else ranks.one_device()
    watchdog = Watchdog(5.0)
    for name, flags in json.loads(path.read_text()).items():
        if ranks.rank() == 0:
            print(f"=== {name}: {flags}", flush=True)
        execute(name, flags, path.parent, device, watchdog)
    ranks.leave(watchdog.close)


if __name__ == "__main__":
    main()
