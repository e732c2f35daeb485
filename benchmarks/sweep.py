"""Run a grid of training runs (model x precision x sequence length x GPUs x batch), one after another.

python -m benchmarks.sweep sweep.yaml [--output_dir DIR] [any flags of train_fp8.py]
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash
import yaml
from filelock import FileLock

from benchmarks.plan.flags import gpu_name
from benchmarks.plan.main import make_plan
from benchmarks.plan.time import GPUS, Gpu
from benchmarks.records.launch import (
    EXIT_INTERRUPTED,
    Outcome,
    count_gpus,
    folder_flag,
    is_finished,
    launch,
    make_folder,
    run_command,
)
from benchmarks.records.runs import INDIFFERENT
from benchmarks.records.variants import DECIDED, Variant, given_settings, parse_variants, resolve
from core.cli import OneLineParser, YamlLoader, yaml_fault
from core.files import replace_file
from core.settings import convert, nearest
from training.config import Config, all_settings

PROG = "python -m benchmarks.sweep"
# Axis -> the setting it stands for; any other setting may be an axis under its own name.
AXES = {"model": "model_name", "sequence_length": "max_seq_length"}
OTHER_AXES = ("precision", "gpus")  # variants of benchmarks.compare; GPUs of a run
SHORT = {
    "sequence_length": "seq",
    "sharding_mode": "",
    "batch_size": "batch",
    "gradient_accumulation_steps": "accumulation",
}
PLAN_SLACK = 1.05  # plans were within 3 % of the recorded peaks, of most of ZeRO too
GROWING = ("max_seq_length", "batch_size")  # memory grows with these, all else equal


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
        """What decides whether it runs and fits."""
        return {k: v for k, v in self.cfg.to_dict().items() if k not in INDIFFERENT} | {"gpus": self.gpus}

    def digest(self) -> str:
        return xxhash.xxh3_64_hexdigest(json.dumps(self.settings(), sort_keys=True).encode())


@dataclass(frozen=True)
class Result:
    """What became of a point; status is done, skipped, out_of_memory or failed."""

    name: str
    status: str
    reason: str = ""
    settings: str = ""  # digest of the point's; older files have none

    @property
    def told(self) -> str:
        return f"{self.status}, {self.reason}" if self.reason else self.status


def read_sweep(path: Path) -> dict[str, Any]:
    """The sweep's `grid`, `base` and `needs`. ValueError names the file and what is wrong in it."""
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), YamlLoader)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid YAML: {yaml_fault(error)}") from None
    kinds = {"grid": dict, "base": dict, "needs": list}
    if not isinstance(loaded, dict) or "grid" not in loaded:
        raise ValueError(f"{path}: must hold a `grid:`, and may hold `base:` and `needs:`")
    for name, value in loaded.items():
        if name not in kinds:
            raise ValueError(f"{path}: unknown key {name!r}{nearest(name, kinds)}")
        if not isinstance(value, kinds[name]):
            raise ValueError(f"{path}: `{name}:` must be a {'list' if kinds[name] is list else 'mapping'}")
        if other := next((key for key in value if not isinstance(key, str)), None):
            raise ValueError(f"{path}: `{name}:` holds {other!r}, which is no name of a setting")
    try:
        _check_axes(loaded["grid"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for name in (*loaded.get("base", {}), *loaded.get("needs", [])):
        if name in DECIDED:
            raise ValueError(f"{path}: {name!r} is not for a sweep's file; the sweep sets it itself")
        if name not in all_settings():
            raise ValueError(f"{path}: {name!r} is no setting of all runs{nearest(name, all_settings())}")
    return {"base": {}, "needs": []} | loaded


def _check_axes(grid: dict[str, Any]) -> None:
    if not grid:
        raise ValueError("`grid:` must have an axis, such as precision: [bf16, delayed]")
    names = [*AXES, *OTHER_AXES, *(name for name in all_settings() if name not in DECIDED)]
    for name, values in grid.items():
        if name in AXES and AXES[name] in grid:
            raise ValueError(f"axes {name} and {AXES[name]} are the same; keep one")
        if name not in names:
            raise ValueError(f"axis {name!r} is unknown{nearest(name, names)}")
        if not isinstance(values, list) or not values:
            raise ValueError(f"axis {name}: must be a list with at least one value, not {values!r}")


def read_axes(grid: dict[str, Any], replaced: list[str]) -> dict[str, list[Any]]:
    """The grid's axes with those of `--axis NAME=VALUE,...`; ValueError for an unknown or empty one."""
    axes = dict(grid)
    for text in replaced:
        name, _, values = text.partition("=")
        if name not in grid:
            raise ValueError(f"--axis {text}: the grid has {', '.join(grid)}{nearest(name, grid)}")
        apart = [values] if name == "precision" else values.split(",")  # a variant's settings may have commas
        axes[name] = [_as_in_the_file(name, value, grid[name]) for value in apart if value]
        if not axes[name]:
            raise ValueError(f"--axis {text}: must have at least one value")
    return axes


def _as_in_the_file(axis: str, text: str, values: list[Any]) -> Any:
    """The value of the file's axis that a typed text means, if there is one, so that both are one run."""
    if axis in OTHER_AXES:
        return text
    setting = AXES.get(axis, axis)
    _, _, hint = all_settings()[setting]
    try:
        meant = convert(setting, text, hint)
        return next((value for value in values if convert(setting, value, hint) == meant), text)
    except ValueError:  # told with the run's name, as of any other setting
        return text


def build_points(
    axes: dict[str, list[Any]], given: dict[str, Any], folder: Path, beside: list[Any] | None = None
) -> list[Point]:
    """All points of the grid, the first axis slowest. ValueError for settings that cannot be.

    `beside` are the precisions of the whole file, of which `axes` may have a part.
    """
    named = list(axes)
    variants = _variants(axes.get("precision", ["bf16"]), beside or [])
    axes = axes | {"precision": variants, "gpus": [_gpus(v) for v in axes.get("gpus", [1])]}
    for name in axes:
        if (setting := AXES.get(name, name)) in given:
            raise ValueError(f"--{setting}: it is an axis of the grid; give --axis {name}=... instead")
        _check_labels(name, axes[name])
    points = []
    for values in itertools.product(*axes.values()):
        at = dict(zip(axes, values, strict=True))
        name = "-".join(_label(axis, at[axis]) for axis in named)
        variant, gpus = at.pop("precision"), at.pop("gpus")
        own = {AXES.get(axis, axis): value for axis, value in at.items()}
        try:
            cfg = resolve(given | own | variant.settings, folder / "runs" / name)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        points.append(Point(name, gpus, cfg))
    if twice := next((n for n, count in Counter(p.name for p in points).items() if count > 1), None):
        raise ValueError(f"two runs of the grid would have the folder {twice}; name its values otherwise")
    return points


def _check_labels(axis: str, values: list[Any]) -> None:
    """ValueError where values of an axis give no folder's name, or share one."""
    seen: dict[str, Any] = {}
    for value in values:
        label = _label(axis, value)
        if not label.strip("."):
            raise ValueError(f"axis {axis}: {value!r} gives a run folder no name; write it otherwise")
        if label in seen:
            if str(seen[label]) == str(value):
                raise ValueError(f"axis {axis} has {label} twice; name each value once")
            raise ValueError(
                f"axis {axis}: {seen[label]} and {value} would share the run folders' {label}; let "
                "their last parts differ"
            )
        seen[label] = value


def _variants(values: list[Any], beside: list[Any]) -> list[Variant]:
    """The variants of an axis; `bf16` has the layers it has in the whole file, so that a part is its runs."""
    flag = "axis precision"
    own = [variant.name for variant in parse_variants([str(value) for value in values], flag=flag)]
    others = [str(value) for value in beside if str(value) not in own]
    known = {variant.name: variant for variant in parse_variants([*own, *others], flag=flag)}
    return [known[name] for name in own]


def _gpus(value: Any) -> int:
    if not str(value).isdecimal() or int(value) < 1:
        raise ValueError(f"axis gpus: {value!r} is no number of GPUs")
    return int(value)


def _label(axis: str, value: Any) -> str:
    """A part of a run folder's name, such as Llama-3.2-1B, delayed, seq2048 or gpus2."""
    if axis == "precision":
        return value.folder_name
    text = re.sub(r"[^\w.+=-]", "_", str(value).rstrip("/").rsplit("/", 1)[-1])
    return text if axis == "model" else f"{SHORT.get(axis, axis)}{text}"


def why_skip(
    point: Point,
    results: dict[str, Result],
    points: list[Point],
    machine_gpus: int,
    gpu: Gpu | None = None,
) -> str | None:
    """Why a point cannot run or fit here, known without trying; None if nothing is known.

    `gpu`: what it would have to fit on, by `benchmarks.plan`.
    """
    if point.gpus > max(1, machine_gpus):
        return f"needs {point.gpus} GPUs, this machine has {machine_gpus}"
    if gpu and (needed := _planned_gb(point, gpu)) and needed > gpu.memory_gb * PLAN_SLACK:
        return f"needs {needed:.0f} GB a GPU by benchmarks.plan, of {gpu.memory_gb:.0f}"
    for other in points:
        tried = results.get(other.name)
        if tried and tried.status == "out_of_memory" and _is_smaller(other, point):
            return f"{other.name} ran out of memory, and this one needs more"
    return None


def _planned_gb(point: Point, gpu: Gpu) -> float | None:
    """Peak memory that is planned; None for what is not planned, emulated layers among it."""
    try:
        return sum(make_plan(point.cfg, gpu, gpus=point.gpus).memory.values()) / 1e9
    except ValueError:
        return None


def _is_smaller(a: Point, b: Point) -> bool:
    """Whether `a` is `b` but for a shorter sequence or a smaller batch."""
    if a.name == b.name:
        return False
    first, second = a.settings(), b.settings()
    different = [name for name in first if first[name] != second[name]]
    return all(name in GROWING and first[name] < second[name] for name in different)


def foreseen(
    points: list[Point], folder: Path, results: dict[str, Result], *, retry: bool, gpu: Gpu | None
) -> Iterator[tuple[Point, Result | None]]:
    """Each point, and how it ends as the folder and the `results` so far tell; None: it has to be run."""
    tried = {} if retry else _out_of_memory(folder)
    machine_gpus = count_gpus() if any(point.gpus > 1 for point in points) else 1
    for point in points:
        before = tried.get(point.name)
        if is_finished(point.cfg):
            yield point, Result(point.name, "done")
        elif before and before.settings in ("", point.digest()):
            yield point, before
        else:
            reason = why_skip(point, results, points, machine_gpus, gpu)
            yield point, Result(point.name, "skipped", reason) if reason else None


def run_points(
    points: list[Point], folder: Path, *, retry: bool, gpu: Gpu | None = None
) -> tuple[dict[str, Result], bool]:
    """Run what is neither finished nor known to fail. Returns the results, and whether a signal came."""
    results: dict[str, Result] = {}
    walk = foreseen(points, folder, results, retry=retry, gpu=gpu)
    for number, (point, result) in enumerate(walk, 1):
        title = f"[{number}/{len(points)}] {point.name}"
        if result is None:
            print(f"{title}: {point.folder}", flush=True)
            outcome = launch(point.cfg, gpus=point.gpus, log=folder / "logs" / f"{point.name}.log")
            if outcome.in_use:
                raise ValueError(f"{point.name}: {outcome.error}; then the same command goes on")
            if outcome.stopped:
                print(f"stopped in {point.name}; to go on: the same command", flush=True)
                return results, True
            result = _result(point, outcome)
        results[point.name] = result
        print(f"{title}: {result.told}", flush=True)
        _save(result, folder)
    return results, False


def _result(point: Point, outcome: Outcome) -> Result:
    if not outcome.code:
        return Result(point.name, "done")
    status = "out_of_memory" if outcome.out_of_memory else "skipped" if outcome.refused else "failed"
    return Result(point.name, status, outcome.reason, point.digest())


def _locked(folder: Path) -> FileLock:
    """Held while files that all sweeps into `folder` share are written: several may run at once."""
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / ".sweep.lock")


def _save(result: Result, folder: Path) -> None:
    """Put one result into the folder's sweep.json, beside those of other sweeps into it."""
    record = folder / "sweep.json"
    with _locked(folder):
        results = _read_record(record) | {result.name: result}
        replace_file(record, json.dumps([asdict(r) for r in results.values()], indent=1).encode())


def _read_record(path: Path) -> dict[str, Result]:
    """By name, what sweep.json holds; ValueError if it cannot be read."""
    if not path.exists():
        return {}
    try:
        found = [Result(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); remove it to go on") from None
    return {result.name: result for result in found}


def _out_of_memory(folder: Path) -> dict[str, Result]:
    """The points that ran out of memory before: they would again."""
    found = _read_record(folder / "sweep.json")
    return {name: result for name, result in found.items() if result.status == "out_of_memory"}


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = OneLineParser(
        prog=PROG,
        allow_abbrev=False,
        description=__doc__.splitlines()[0],
        epilog="All other flags are train_fp8.py's (see its --help) and win over the file's `base:`.",
    )
    parser.add_argument("sweep", type=Path, metavar="SWEEP.yaml", help="the grid (benchmarks/sweeps)")
    parser.add_argument(
        "--output_dir", type=folder_flag, help="runs and figures; default: runs/<name of the file>"
    )
    parser.add_argument(
        "--axis",
        action="append",
        default=[],
        metavar="NAME=VALUE,...",
        help="other values for an axis of the grid, such as gpus=1 or precision=bf16_hf,tensorwise",
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help=f"skip what does not fit on it by benchmarks.plan: {', '.join(GPUS)}"
    )
    parser.add_argument("--retry", action="store_true", help="try again what ran out of memory before")
    parser.add_argument(
        "--dry_run", action="store_true", help="list the runs and what is known of them, start none"
    )
    return parser.parse_known_args(argv)


def sweep(argv: list[str]) -> int:
    args, training = parse(argv)
    grid_file = read_sweep(args.sweep)
    given = grid_file["base"] | given_settings(training, PROG)
    axes = read_axes(grid_file["grid"], args.axis)
    for name in grid_file["needs"]:
        if name not in given:
            raise ValueError(f"{args.sweep}: needs --{name}; give it on the command line")
    gpu = GPUS.get(gpu_name(args.gpu)) if args.gpu is not None else None
    if args.gpu is not None and gpu is None:
        raise ValueError(f"--gpu {args.gpu}: not one of {', '.join(GPUS)}{nearest(args.gpu, GPUS)}")
    folder = args.output_dir or Path("runs") / args.sweep.stem
    points = build_points(axes, given, folder, beside=grid_file["grid"].get("precision"))
    if args.dry_run:
        results: dict[str, Result] = {}
        for point, result in foreseen(points, folder, results, retry=args.retry, gpu=gpu):
            print(f"{point.name}: {result.told if result else 'to run'}")
            results |= {point.name: result} if result else {}
        return 0
    for point in points:  # a folder of other settings is told before hours are spent
        is_finished(point.cfg)
    make_folder(folder)
    results, stopped = run_points(points, folder, retry=args.retry, gpu=gpu)
    if stopped:
        return EXIT_INTERRUPTED
    from benchmarks.report import main as report  # matplotlib takes a while; refusals do not wait for it

    done = [str(point.folder) for point in points if results[point.name].status == "done"]
    with _locked(folder):
        reported = report.main([*done, "--output_dir", str(folder)]) if done else 0
    print("\n" + ", ".join(f"{n} {s}" for s, n in Counter(r.status for r in results.values()).items()))
    for result in results.values():
        if result.status != "done":
            print(f"- {result.name}: {result.told}")
    return reported or int(any(r.status == "failed" for r in results.values()) or not done)


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 the grid is done; 1 a run failed, or none ran; 2 a setting is wrong; 75 stopped."""
    return run_command(sweep, argv)


if __name__ == "__main__":
    sys.exit(main())
