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
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from fp8_suite.training import run as run_module
from fp8_suite.training.assembly import assemble
from fp8_suite.training.config import parse_config
from fp8_suite.training.parallel import ranks
from fp8_suite.training.parallel.watchdog import Watchdog
from fp8_suite.training.precision.scaling import scaling_state
from fp8_suite.training.prepare import prepare


def fingerprint(tensors: dict[str, torch.Tensor]) -> float:
    return sum(t.double().sum().item() * (i + 1) for i, t in enumerate(tensors.values()))


def execute(name: str, flags: str, folder: Path, device: torch.device, watchdog: Watchdog) -> None:
    argv = [*shlex.split(flags), "--output_dir", str(folder / name)]
    cfg = parse_config(argv, prog="many_runs.py", description="")
    torch.cuda.reset_peak_memory_stats()
    built = []
    with ExitStack() as cleanup, ExitStack() as signals:
        prepared, loaders = prepare(cfg, device, watchdog, time.perf_counter(), cleanup)
        run_module.assemble = lambda *args: built.append(assemble(*args)) or built[-1]
        code = run_module.run(prepared, loaders, cleanup, signals)
    model = built[0].model
    state = {"code": code, "scaling": fingerprint(scaling_state(model))}
    state["fp8_weights"] = sum(len(getattr(m, "_fp8_workspaces", ())) for m in model.modules())
    state["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    states = ranks.gather(state)
    if ranks.rank() == 0:
        (folder / f"{name}.ranks.json").write_text(json.dumps(states))


def join_on_one_gpu() -> torch.device:
    """Join torchrun's job with all ranks on the first GPU."""
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
