"""Started by torchrun, or alone: many small runs in the same processes, whose start takes longer than a run.

Usage: many_runs.py FILE, which holds a JSON object of run names and their flags. Beside each run folder goes
NAME.ranks.json: what each rank was left with.
"""

import json
import shlex
import sys
import time
from pathlib import Path

import torch

from training.config import parse_config
from training.parallel import ranks
from training.parallel.watchdog import Watchdog
from training.precision.scaling_state import scaling_state
from training.run import Run


def fingerprint(tensors: dict[str, torch.Tensor]) -> float:
    return sum(t.double().sum().item() * (i + 1) for i, t in enumerate(tensors.values()))


def go(name: str, flags: str, folder: Path, device: torch.device, watchdog: Watchdog) -> None:
    argv = [*shlex.split(flags), "--output_dir", str(folder / name)]
    cfg = parse_config(argv, prog="many_runs.py", description="")
    torch.cuda.reset_peak_memory_stats()
    run = Run(cfg, device, watchdog, time.perf_counter())
    code = run.run()
    run.signals.close()
    left = {"code": code, "scaling": fingerprint(scaling_state(run.model))}
    left["fp8_weights"] = sum(len(getattr(m, "_fp8_workspaces", ())) for m in run.model.modules())
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
