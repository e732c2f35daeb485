"""Train every combination of models, precisions, sequence lengths and other settings, one after another.

python -m benchmarks.sweep sweep.yaml [--output_dir DIR] [any flags of train_fp8.py]
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8_suite.benchmarks.launch.grid import Failures, GridRun, require_all_inputs, run_config, train_all
from fp8_suite.benchmarks.launch.process import is_finished
from fp8_suite.benchmarks.launch.variants import OWNED, parse_flags, parse_variants, split_settings
from fp8_suite.benchmarks.records.runs import bad_input
from fp8_suite.core.cli import as_command, command_parser
from fp8_suite.core.errors import bad_setting
from fp8_suite.core.readers import UnreadableFile, read_yaml
from fp8_suite.core.settings import convert, nearest
from fp8_suite.training.config import all_settings

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
    """Return the grid's axes, with the values of `--axis NAME=VALUE,...` instead of the file's."""
    axes = dict(grid)
    for text in replaced:
        name, _, values = text.partition("=")
        if name not in grid:
            reason = f"not an axis of the grid, which has {', '.join(grid)}{nearest(name, grid)}"
            raise bad_setting(reason, axis=text)
        parts = [values] if name == "precision" else values.split(",")  # variants may contain commas
        axes[name] = [value for value in parts if value]
        if not axes[name]:
            raise bad_setting("give one value or more", axis=text)
    return axes


def build_grid(
    axes: dict[str, list[Any]], common: dict[str, Any], folder: Path, precisions: Sequence[Any] = ()
) -> list[GridRun]:
    """Return all runs of the grid; the first axis varies slowest. UserError for conflicting settings.

    `precisions` are the file's values of that axis, of which `axes` may have fewer.
    """
    named, runs = list(axes), []
    values, beside = [*map(str, axes.get("precision", ["bf16"]))], map(str, precisions)
    variants = parse_variants(values, flag="axis precision", beside=beside)
    axes = axes | {"precision": variants, "gpus": axes.get("gpus", [1])}
    for name in axes:
        if (setting := AXES.get(name, name)) in common:
            reason = f"is an axis of the grid; give --axis {name}=... instead"
            raise bad_setting(reason, **{setting: common[setting]})
    for values in itertools.product(*axes.values()):
        at = dict(zip(axes, values, strict=True))
        name = "-".join(_label(axis, at[axis]) for axis in named)
        variant, gpus = at.pop("precision"), convert("gpus", at.pop("gpus"), int)
        settings = common | {k: v for axis, value in at.items() for k, v in _settings(axis, value).items()}
        cfg = run_config(name, settings | variant.settings, gpus, folder / "runs" / name)
        runs.append(GridRun(name=name, cfg=cfg, gpus=gpus))
    if twice := next((n for n, count in Counter(run.name for run in runs).items() if count > 1), None):
        raise bad_input(f"two runs of the grid have the folder name {twice}; change the values that name it")
    return runs


def _settings(axis: str, value: Any) -> dict[str, Any]:
    """Return the settings of an axis value, such as 8 or `hsdp+hsdp_shard_size=2`."""
    first, further = split_settings(value) if "=" in str(value) else (value, {})
    return {AXES.get(axis, axis): first} | further


def _label(axis: str, value: Any) -> str:
    """Return a part of the run folder's name, such as Llama-3.2-1B, delayed, seq2048 or gpus2."""
    if axis == "precision":
        return value.folder_name
    return SHORT.get(axis, axis) + re.sub(r"[^\w.+=-]", "_", str(value).rstrip("/").rsplit("/", 1)[-1])


def why_skip(run: GridRun) -> str | None:
    """Return why a run cannot start on this machine, or None."""
    if run.gpus == 1:
        return None
    import torch  # slow to import

    present = torch.cuda.device_count()
    return f"needs {run.gpus} GPUs, this machine has {present}" if run.gpus > present else None


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the parsed flags of the sweep, and the training settings."""
    parser = command_parser(PROG, __doc__, trains=True)
    file = "grid and base settings; training flags override these"
    parser.add_argument("sweep", type=Path, metavar="SWEEP.yaml", help=file)
    output = "folder for runs and report (default: runs/<name of the file>)"
    parser.add_argument("--output_dir", type=Path, metavar="DIR", help=output)
    axis = "replace the values of an axis, such as gpus=1 or precision=bf16_hf,tensorwise"
    parser.add_argument("--axis", action="append", default=[], metavar="NAME=VALUE,...", help=axis)
    parser.add_argument("--dry_run", action="store_true", help="list the runs and their status; run nothing")
    return parse_flags(parser, argv)


@as_command
def main(argv: list[str]) -> int:
    """Run the sweep. Exit codes: 0 done, 1 a run failed or none finished, 2 bad setting, 75 interrupted."""
    args, given = parse(argv)
    file = read_sweep(args.sweep)
    common = file["base"] | given
    if missing := next((name for name in file["needs"] if name not in common), None):
        raise bad_input(f"{args.sweep}: needs --{missing}; add it to the command line")
    folder = args.output_dir or Path("runs") / args.sweep.stem
    axes, precisions = read_axes(file["grid"], args.axis), file["grid"].get("precision", ())
    runs = build_grid(axes, common, folder, precisions)
    if args.dry_run:
        for run in runs:
            reason = why_skip(run)
            status = f"skipped, {reason}" if reason else "finished" if is_finished(run.cfg) else "to run"
            print(f"{run.name}: {status}")
        return 0
    require_all_inputs(runs)
    failures = train_all(runs, folder, lambda run, failures: why_skip(run))
    return conclude(runs, failures, folder)


def conclude(runs: list[GridRun], failures: Failures, folder: Path) -> int:
    """Write the report of the finished runs, list the others, and return the exit code."""
    from fp8_suite.benchmarks.report import main as report  # imports matplotlib, which is slow

    finished = [str(run.folder) for run in runs if run.name not in failures]
    reported = report.main([*finished, "--output_dir", str(folder)]) if finished else 0
    skipped = sum(outcome.refused for outcome in failures.values())
    print(f"\n{len(finished)} finished, {skipped} skipped, {len(failures) - skipped} failed")
    for name, outcome in failures.items():
        print(f"- {name}: {'skipped' if outcome.refused else 'failed'}, {outcome.reason}")
    return reported or int(len(failures) > skipped or not finished)


if __name__ == "__main__":
    sys.exit(main())
