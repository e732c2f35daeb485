"""Started by torchrun, or alone: many small runs in the same processes, whose start takes longer than a run.

Usage: many_runs.py FILE, which holds a JSON object of run names and their flags. Beside each run folder goes
NAME.ranks.json: what each rank was left with.
"""

import json
import shlex
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from training import run as run_module
from training.assembly import assemble
from training.config import parse_config
from training.parallel import ranks
from training.parallel.watchdog import Watchdog
from training.precision.scaling_state import scaling_state
from training.prepare import prepare


def fingerprint(tensors: dict[str, torch.Tensor]) -> float:
    return sum(t.double().sum().item() * (i + 1) for i, t in enumerate(tensors.values()))


def go(name: str, flags: str, folder: Path, device: torch.device, watchdog: Watchdog) -> None:
    argv = [*shlex.split(flags), "--output_dir", str(folder / name)]
    cfg = parse_config(argv, prog="many_runs.py", description="")
    torch.cuda.reset_peak_memory_stats()
    built = []
    with ExitStack() as cleanup, ExitStack() as signals:
        job = prepare(cfg, device, watchdog, time.perf_counter(), cleanup)
        run_module.assemble = lambda *args: built.append(assemble(*args)) or built[-1]
        code = run_module.run(job, cleanup, signals)
    model = built[0].model
    left = {"code": code, "scaling": fingerprint(scaling_state(model))}
    left["fp8_weights"] = sum(len(getattr(m, "_fp8_workspaces", ())) for m in model.modules())
    left["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    everyone = ranks.gather(left)
    if ranks.rank() == 0:
        (folder / f"{name}.ranks.json").write_text(json.dumps(everyone))


def main() -> None:
    path = Path(sys.argv[1])
    device = ranks.join(5.0) if ranks.under_torchrun() else ranks.one_device()
    watchdog = Watchdog(5.0)
    for name, flags in json.loads(path.read_text()).items():
        if ranks.rank() == 0:
            print(f"=== {name}: {flags}", flush=True)
        go(name, flags, path.parent, device, watchdog)
    ranks.leave(watchdog.close)


if __name__ == "__main__":
    main()
