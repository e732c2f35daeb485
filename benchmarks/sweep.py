"""Train every combination of models, precisions, sequence lengths and other settings, one after another.

python -m benchmarks.sweep sweep.yaml [--output_dir DIR] [any flags of train_fp8.py]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock
from fp8_suite.benchmarks.plan.predict import Plan, make_plan
from fp8_suite.benchmarks.records.launch import (
    command_parser,
    folder_flag,
    is_finished,
    launch,
    refuse_overwriting,
    run_command,
)
from fp8_suite.benchmarks.records.runs import NO_EFFECT, bad_input
from fp8_suite.benchmarks.records.variants import (
    OWNED,
    Variant,
    given_settings,
    parse_variants,
    resolve,
    split_flags,
)
from fp8_suite.core.errors import EXIT_OUT_OF_MEMORY, UserError, bad_setting
from fp8_suite.core.files import replace_file
from fp8_suite.core.gpus import PLANNED, Gpu, find_gpu
from fp8_suite.core.readers import UnreadableFile, read_yaml
from fp8_suite.core.settings import AUTO, convert, nearest
from fp8_suite.training.config import Config, all_settings
from fp8_suite.training.estimate.sizes import check_launch
from fp8_suite.training.launch import require_inputs

PROG = "python -m benchmarks.sweep"
# Short names of axes. All other settings are axes under their own names.
AXES = {"model": "model_name", "sequence_length": "max_seq_length"}
OTHER_AXES = ("precision", "gpus")  # variants as in benchmarks.compare, and GPUs per run
SHORT = {  # prefixes in the names of run folders
    "model": "",
    "sharding_mode": "",
    "sequence_length": "seq",
    "batch_size": "batch",
    "gradient_accumulation_steps": "accumulation",
    "global_batch_size": "global",
}
PLAN_SLACK = 1.05  # most predicted peaks are within 5 % of the measured ones
GROWING = ("max_seq_length", "batch_size")  # larger values need more memory


@dataclass(frozen=True)
class Point:
    """One run of the grid."""

    name: str
    gpus: int
    cfg: Config

    @property
    def folder(self) -> Path:
        return Path(self.cfg.checkpoint.output_dir)

    def settings(self) -> dict[str, Any]:
        """Return all settings that can affect whether the run fits into memory."""
        settings = {name: value for name, value in self.cfg.to_dict().items() if name not in NO_EFFECT}
        limit = self.cfg.sharding.memory_limit_gb
        return settings | {"gpus": self.gpus} | ({"memory_limit_gb": limit} if limit else {})

    def digest(self) -> str:
        return xxhash.xxh3_64_hexdigest(json.dumps(self.settings(), sort_keys=True).encode())


@dataclass(frozen=True)
class Result:
    """Outcome of a point; status is done, skipped, out_of_memory or failed."""

    name: str
    status: str
    reason: str = ""
    settings: str = ""  # digest of the point's settings, if it ran

    def __str__(self) -> str:
        return f"{self.status}, {self.reason}" if self.reason else self.status


def read_sweep(path: Path) -> dict[str, Any]:
    """Return `grid`, `base` and `needs` of a sweep file. UserError for a malformed file."""
    try:
        file = read_yaml(path)
    except UnreadableFile as fault:
        raise bad_input(str(fault)) from None
    kinds = {"grid": dict, "base": dict, "needs": list}
    if not isinstance(file, dict) or not all(isinstance(file[key], kinds.get(key, ())) for key in file):
        raise bad_input(f"{path}: may only have `grid:` (axes), `base:` (settings) and `needs:` (a list)")
    file = {"grid": {}, "base": {}, "needs": []} | file
    if not file["grid"] or not all(isinstance(values, list) and values for values in file["grid"].values()):
        raise bad_input(f"{path}: needs a `grid:` of axes with lists, such as precision: [bf16, delayed]")
    known = [*AXES, *OTHER_AXES, *(name for name in all_settings() if name not in OWNED)]
    for name in (*file["grid"], *file["base"], *file["needs"]):
        if name not in known:
            raise bad_input(f"{path}: unknown setting {name!r}{nearest(name, known)}")
    return file


def read_axes(grid: dict[str, list[Any]], replaced: list[str]) -> dict[str, list[Any]]:
    """Return the grid's axes, with the values of `--axis NAME=VALUE,...` instead of the file's.

    The file's spelling of a value names its run folder: 0.00001 becomes 1e-5 if the file has that.
    """
    axes = dict(grid)
    for text in replaced:
        name, _, values = text.partition("=")
        if name not in grid:
            reason = f"not an axis of the grid, which has {', '.join(grid)}{nearest(name, grid)}"
            raise bad_setting(reason, axis=text)
        parts = [values] if name == "precision" else values.split(",")  # variants may contain commas
        in_file = {_typed(name, value): value for value in grid[name]}
        axes[name] = [in_file.get(_typed(name, value), value) for value in parts if value]
        if not axes[name]:
            raise bad_setting("needs at least one value", axis=text)
    return axes


def _typed(axis: str, value: Any) -> Any:
    setting = AXES.get(axis, axis)
    return str(value) if axis in OTHER_AXES else convert(setting, value, all_settings()[setting].type)


def build_points(
    axes: dict[str, list[Any]], given: dict[str, Any], folder: Path, precisions: Sequence[Any] = ()
) -> list[Point]:
    """Return all points of the grid; the first axis varies slowest. UserError for conflicting settings.

    `precisions` are the file's values of that axis, of which `axes` may have fewer.
    """
    named, points = list(axes), []
    variants = _variants(axes.get("precision", ["bf16"]), precisions)
    axes = axes | {"precision": variants, "gpus": axes.get("gpus", [1])}
    for name in axes:
        if (setting := AXES.get(name, name)) in given:
            reason = f"is an axis of the grid; give --axis {name}=... instead"
            raise bad_setting(reason, **{setting: given[setting]})
    for values in itertools.product(*axes.values()):
        at = dict(zip(axes, values, strict=True))
        name = "-".join(_label(axis, at[axis]) for axis in named)
        variant, gpus = at.pop("precision"), convert("gpus", at.pop("gpus"), int)
        own = {AXES.get(axis, axis): value for axis, value in at.items()}
        if gpus < 1:
            raise bad_setting("must be at least 1", gpus=gpus)
        try:
            cfg = resolve(given | own | variant.settings, folder / "runs" / name)
            check_launch(cfg, gpus)
        except UserError as fault:
            raise bad_input(f"{name}: {fault}") from None
        points.append(Point(name, gpus, cfg))
    if twice := next((n for n, count in Counter(p.name for p in points).items() if count > 1), None):
        raise bad_input(f"two runs of the grid have the folder name {twice}; change the values that name it")
    return points


def _variants(values: Sequence[Any], precisions: Sequence[Any]) -> list[Variant]:
    """Return the variants of an axis. The layers of `bf16` follow from all `precisions` of the file."""
    flag = "axis precision"
    own = [variant.name for variant in parse_variants([str(value) for value in values], flag=flag)]
    others = [str(value) for value in precisions if str(value) not in own]
    known = {variant.name: variant for variant in parse_variants([*own, *others], flag=flag)}
    return [known[name] for name in own]


def _label(axis: str, value: Any) -> str:
    """Return a part of the run folder's name, such as Llama-3.2-1B, delayed, seq2048 or gpus2."""
    if axis == "precision":
        return value.folder_name
    return SHORT.get(axis, axis) + re.sub(r"[^\w.+=-]", "_", str(value).rstrip("/").rsplit("/", 1)[-1])


def count_gpus() -> int:
    """Return the number of visible GPUs."""
    import torch  # slow to import

    return torch.cuda.device_count()


def why_skip(
    point: Point, results: dict[str, Result], points: list[Point], machine_gpus: int, gpu: Gpu | None = None
) -> str | None:
    """Return why a point cannot run or would not fit into memory, or None. `gpu` must be large enough."""
    if point.gpus > max(1, machine_gpus):
        return f"needs {point.gpus} GPUs, this machine has {machine_gpus}"
    if gpu and (plan := _plan(point, gpu)) and plan.peak / 1e9 > plan.gpu.memory_gb * PLAN_SLACK:
        available = "--memory_limit_gb is" if point.cfg.sharding.memory_limit_gb else "the GPU has"
        needed = f"needs {plan.peak / 1e9:.0f} GB per GPU, as predicted"
        return f"{needed}; {available} {plan.gpu.memory_gb:.0f} GB"
    for other in points:
        tried = results.get(other.name)
        if tried and tried.status == "out_of_memory" and _is_smaller(other, point):
            return f"needs more memory than {other.name}, which ran out of it"
    return None


def _plan(point: Point, gpu: Gpu) -> Plan | None:
    """Return the prediction for a point; None if the planner does not cover the run."""
    try:
        return make_plan(point.cfg, gpu, gpus=point.gpus)
    except UserError:
        return None


def _is_smaller(a: Point, b: Point) -> bool:
    """True if `a` differs from `b` only by a shorter sequence or a smaller batch."""
    first, second = a.settings(), b.settings()
    different = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    comparable = all(name in GROWING and AUTO not in (first[name], second[name]) for name in different)
    return bool(different) and comparable and all(first[name] < second[name] for name in different)


def run_points(
    points: list[Point], folder: Path, *, retry: bool = False, gpu: Gpu | None = None, dry_run: bool = False
) -> dict[str, Result]:
    """Run the points that are not finished and may fit; none if `dry_run`. Returns all results."""
    results: dict[str, Result] = {}
    recorded = _read_record(folder / "sweep.json")
    before = {} if retry else recorded
    machine_gpus = count_gpus() if any(point.gpus > 1 for point in points) else 1
    for number, point in enumerate(points, 1):
        title, result, tried = f"[{number}/{len(points)}] {point.name}", None, before.get(point.name)
        if is_finished(point.cfg):
            result = Result(point.name, "done")
        elif tried and tried.status == "out_of_memory" and tried.settings == point.digest():
            result = tried
        elif reason := why_skip(point, results, points, machine_gpus, gpu):
            result = Result(point.name, "skipped", reason)
        elif not dry_run:
            print(f"{title}: {point.folder}", flush=True)
            result = _run(point, folder)
        print(f"{title}: {result or 'to run'}", flush=True)
        if result:
            results[point.name] = result
            if not dry_run:
                _save(result, folder)
    return results


def _run(point: Point, folder: Path) -> Result:
    outcome = launch(point.cfg, gpus=point.gpus, log=folder / "logs" / f"{point.name}.log")
    if not outcome.code:
        return Result(point.name, "done")
    failed = "skipped" if outcome.refused else "failed"
    status = "out_of_memory" if outcome.code == EXIT_OUT_OF_MEMORY else failed
    return Result(point.name, status, outcome.reason, point.digest())


def _lock(folder: Path) -> FileLock:
    """Return the lock for files that concurrent sweeps in one folder share."""
    return FileLock(folder / ".sweep.lock")


def _save(result: Result, folder: Path) -> None:
    """Add a result to sweep.json."""
    record = folder / "sweep.json"
    with _lock(folder):
        results = _read_record(record) | {result.name: result}
        replace_file(record, json.dumps([asdict(r) for r in results.values()], indent=1).encode())


def _read_record(path: Path) -> dict[str, Result]:
    """Return the results in sweep.json, by name. UserError if it is damaged."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        return {entry["name"]: Result(**entry) for entry in entries}
    except (ValueError, TypeError, KeyError) as fault:
        reason = f"damaged, or not of a sweep ({fault}); delete it: finished runs are not repeated"
        raise bad_input(f"{path}: {reason}") from None


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the parsed flags of the sweep, and the training flags."""
    parser = command_parser(PROG, __doc__, trains=True)
    file = "grid and base settings; training flags override these"
    parser.add_argument("sweep", type=Path, metavar="SWEEP.yaml", help=file)
    output = "folder for runs and report (default: runs/<name of the file>)"
    parser.add_argument("--output_dir", type=folder_flag, metavar="DIR", help=output)
    axis = "replace the values of an axis, such as gpus=1 or precision=bf16_hf,tensorwise"
    parser.add_argument("--axis", action="append", default=[], metavar="NAME=VALUE,...", help=axis)
    gpu = f"skip runs that are predicted not to fit into this GPU's memory: {', '.join(PLANNED)}"
    parser.add_argument("--gpu", metavar="NAME", help=gpu)
    parser.add_argument("--retry", action="store_true", help="also run what ran out of memory before")
    parser.add_argument("--dry_run", action="store_true", help="list the runs and their status; run nothing")
    return split_flags(parser, argv)


def sweep(argv: list[str]) -> int:
    args, training = parse(argv)
    file = read_sweep(args.sweep)
    given = file["base"] | given_settings(training, PROG)
    if missing := next((name for name in file["needs"] if name not in given), None):
        raise bad_input(f"{args.sweep}: needs --{missing}; add it to the command line")
    gpu = None
    if args.gpu is not None and (gpu := PLANNED.get(find_gpu(args.gpu))) is None:
        reason = f"unknown GPU{nearest(args.gpu, PLANNED)}; choose from {', '.join(PLANNED)}"
        raise bad_setting(reason, gpu=args.gpu)
    folder = args.output_dir or Path("runs") / args.sweep.stem
    axes, precisions = read_axes(file["grid"], args.axis), file["grid"].get("precision", ())
    points = build_points(axes, given, folder, precisions)
    if args.dry_run:
        run_points(points, folder, retry=args.retry, gpu=gpu, dry_run=True)
        return 0
    refuse_overwriting(folder)
    for point in points:  # raises before anything runs, also for run folders with other settings
        if not is_finished(point.cfg):
            require_inputs(point.cfg)
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("WANDB_RUN_GROUP", folder.resolve().name)
    return conclude(points, run_points(points, folder, retry=args.retry, gpu=gpu), folder)


def conclude(points: list[Point], results: dict[str, Result], folder: Path) -> int:
    """Write the report of the finished runs, list the others, and return the exit code."""
    from fp8_suite.benchmarks.report import main as report  # imports matplotlib, which is slow

    done = [str(point.folder) for point in points if results[point.name].status == "done"]
    with _lock(folder):
        reported = report.main([*done, "--output_dir", str(folder)]) if done else 0
    print("\n" + ", ".join(f"{n} {s}" for s, n in Counter(r.status for r in results.values()).items()))
    for result in results.values():
        if result.status != "done":
            print(f"- {result.name}: {result}")
    return reported or int(any(r.status == "failed" for r in results.values()) or not done)


def main(argv: list[str] | None = None) -> int:
    """Run the sweep. Exit codes: 0 done, 1 a run failed or none finished, 2 bad setting, 75 interrupted."""
    return run_command(sweep, argv)


if __name__ == "__main__":
    sys.exit(main())
