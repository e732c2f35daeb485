"""Table and loss curve of finished, stopped or crashed runs, read from their run folders alone.

python -m benchmarks.report RUN [RUN ...] [--output_dir DIR]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from matplotlib.figure import Figure

from benchmarks.fp8_heatmap import draw_casts, last_casts
from training.metrics import perplexity

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # as metrics.jsonl writes them


@dataclass(frozen=True)
class RunRecord:
    """What a run folder says; `summary` is None for a run that did not get to its end."""

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    records: list[dict[str, Any]]
    summary: dict[str, Any] | None

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def series(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) of every finite value logged."""
        found = [(record["step"], record[metric]) for record in self.records if metric in record]
        return [(step, value) for step, value in found if math.isfinite(value)]

    def value(self, name: str) -> Any:
        """A summary value by its name; of a run without summary what metrics.jsonl tells, else None."""
        if self.summary is not None:
            return self.summary.get(name)
        return self.environment.get(name, self.config.get(name, self._from_metrics(name)))

    @property
    def gpus(self) -> int:
        """GPUs of the whole job, 0 on a CPU; a run recorded before several could take part had one."""
        if self.summary is not None:
            return self.summary.get("gpus", 1)
        return self.environment.get("world_size", 1) if self.environment.get("gpu_name") else 0

    @property
    def tokens_per_gpu(self) -> float | None:
        """Tokens/s of one GPU."""
        rate = self.value("tokens_per_second")
        return rate / self.gpus if rate is not None and self.gpus else None

    def _from_metrics(self, name: str) -> Any:
        if name == "steps":
            return self.records[-1]["step"] if self.records else 0
        metric, reduce = FROM_METRICS.get(name, (None, None))
        values = [value for _, value in self.series(metric)] if metric else []
        return reduce(values) if values else None


def read_run(folder: Path) -> RunRecord:
    """Read a run folder; ValueError if it is none, or holds a broken file."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: not a run folder (it has no config.json)")
    summary = folder / "summary.json"
    return RunRecord(
        folder=folder,
        config=_read_json(folder / "config.json"),
        environment=_read_json(folder / "env.json") if (folder / "env.json").exists() else {},
        records=_read_metrics(folder / "metrics.jsonl"),
        summary=_read_json(summary) if summary.exists() else None,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return _with_numbers(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """The logged lines; a run that is being written, or was killed, may end in half a line."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            records.append(_with_numbers(json.loads(line)))
        except ValueError:
            continue
    return records


def _with_numbers(values: dict[str, Any]) -> dict[str, Any]:
    return {k: NON_FINITE.get(v, v) if isinstance(v, str) else v for k, v in values.items()}


def tail_mean(values: list[float]) -> float:
    """Mean of the last 10 % (at least one value)."""
    return fmean(values[-max(1, len(values) // 10) :])


def _after_warmup(values: list[float]) -> float:
    return median(values[1:] or values)  # the first line holds the warm-up


# Summary value -> (metric, how its series becomes the value), for runs that left no summary.
FROM_METRICS: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "train_loss": ("train/loss", lambda values: values[-1]),
    "train_loss_tail_mean": ("train/loss", tail_mean),
    "eval_loss": ("eval/loss", lambda values: values[-1]),
    "eval_perplexity": ("eval/loss", lambda values: perplexity(values[-1])),
    "tokens_per_second": ("perf/tokens_per_second", _after_warmup),
    "model_tflops_per_gpu": ("perf/model_tflops_per_gpu", _after_warmup),
    "mfu_bf16": ("perf/mfu_bf16", _after_warmup),
    "mfu_fp8": ("perf/mfu_fp8", _after_warmup),
    "peak_memory_gb": ("perf/peak_memory_gb", max),
}


Cell = Callable[[RunRecord, list[RunRecord]], str]  # of a run, beside all runs of the report


def _shown(format_: str, *names: str) -> Cell:
    """A cell of one or more values, with a dash for each that the run does not have."""

    def cell(run: RunRecord, _: list[RunRecord]) -> str:
        values = [run.value(name) for name in names]
        return " / ".join("-" if value is None else format_.format(value) for value in values)

    return cell


def _name(run: RunRecord, _: list[RunRecord]) -> str:
    return run.name if run.summary is not None else f"{run.name} (unfinished)"


def _precision(run: RunRecord, _: list[RunRecord]) -> str:
    mixed, recipe = run.value("mixed_precision"), run.value("recipe")
    text = mixed if recipe in (None, mixed) else f"{mixed} {recipe}"
    if run.value("fallback_reason"):
        text += f" (asked for {run.value('requested_recipe')})"
    if run.value("emulated"):
        text += " (emulated)"
    return f"{text}, {'TE' if run.value('use_te') else 'HF'} layers"


def _mode(run: RunRecord, _: list[RunRecord]) -> str:
    known = run.summary or run.environment  # config.json has what was asked for, perhaps `auto`
    return known.get("sharding_mode", "single") if known else "-"


def _per_gpu(run: RunRecord, _: list[RunRecord]) -> str:
    return "-" if run.tokens_per_gpu is None else f"{run.tokens_per_gpu:,.0f}"


def _work(run: RunRecord) -> list[Any]:
    """What two runs must share for their rates to be compared."""
    names = ("model_name", "mixed_precision", "recipe", "use_te")
    return [*(run.value(name) for name in names), run.config.get("max_seq_length")]


def _scaling(run: RunRecord, runs: list[RunRecord]) -> str:
    """Tokens/s per GPU against the one-GPU run of the same work; a dash unless there is exactly one."""
    alone = [other for other in runs if other.gpus == 1 and _work(other) == _work(run)]
    if run.gpus < 2 or len(alone) != 1 or not run.tokens_per_gpu or not alone[0].tokens_per_gpu:
        return "-"
    return f"{run.tokens_per_gpu / alone[0].tokens_per_gpu:.1%}"


COLUMNS: dict[str, Cell] = {
    "run": _name,
    "model": _shown("{}", "model_name"),
    "precision": _precision,
    "GPUs": lambda run, _: str(run.gpus or "-"),
    "mode": _mode,
    "steps": _shown("{:,}", "steps"),
    "train loss": _shown("{:.4f}", "train_loss"),
    "train loss, mean of last 10 %": _shown("{:.4f}", "train_loss_tail_mean"),
    "eval loss": _shown("{:.4f}", "eval_loss"),
    "perplexity": _shown("{:.2f}", "eval_perplexity"),
    "tokens/s": _shown("{:,.0f}", "tokens_per_second"),
    "tokens/s per GPU": _per_gpu,
    "scaling": _scaling,
    "TFLOP/s per GPU": _shown("{:,.1f}", "model_tflops_per_gpu"),
    "MFU (of BF16 / FP8 peak)": _shown("{:.1%}", "mfu_bf16", "mfu_fp8"),
    "peak GB": _shown("{:.1f}", "peak_memory_gb"),
    "GPU-hours": _shown("{:.2f}", "gpu_hours"),
}


PACKAGES = ("torch", "transformer_engine", "transformers")


def table(runs: list[RunRecord]) -> str:
    """Markdown: one row a run, and under it where, when and with which versions each one ran."""
    rows = [list(COLUMNS), ["---"] * len(COLUMNS)]
    rows += [[cell(run, runs).replace("|", "\\|") for cell in COLUMNS.values()] for run in runs]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", *(f"- {run.name}: {provenance(run)}" for run in runs)])


def provenance(run: RunRecord) -> str:
    """GPUs, date, versions and commit, from env.json."""
    environment = run.environment
    if not environment:
        return "stopped before it looked at the machine"
    versions, git = environment["versions"], environment["git"]
    machine = environment["gpu_name"] or "CPU"
    parts = [f"{run.gpus} x {machine}" if run.gpus else machine, environment["date"][:10]]
    parts += [f"{name} {versions[name]}" for name in PACKAGES if versions.get(name)]
    if git:
        parts.append(f"commit {git['commit'][:12]}{' with changes' if git['dirty'] else ''}")
    return ", ".join(parts)


def smooth(values: list[float]) -> list[float]:
    """Centred moving mean over about 5 % of the values; the window narrows evenly towards both ends."""
    most = len(values) // 40
    halves = [min(most, i, len(values) - 1 - i) for i in range(len(values))]
    return [fmean(values[i - half : i + half + 1]) for i, half in enumerate(halves)]


def draw_losses(runs: list[RunRecord]) -> Figure:
    """Training loss, raw and smoothed, and evaluation loss of all runs on shared axes."""
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    names = [run.name for run in runs]
    for i, run in enumerate(runs):
        color, label = f"C{i % 10}", run.name if names.count(run.name) == 1 else str(run.folder)
        if train := run.series("train/loss"):
            steps, losses = zip(*train, strict=True)
            axes.plot(steps, losses, color=color, alpha=0.3, linewidth=1)
            axes.plot(steps, smooth(list(losses)), color=color, label=f"{label}: training, smoothed")
        if evaluation := run.series("eval/loss"):
            axes.plot(*zip(*evaluation, strict=True), "o--", color=color, label=f"{label}: evaluation")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per label token)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def write_figures(runs: list[RunRecord], target: Path) -> str | None:
    """loss.png and each run's fp8_stats.png, as far as the runs have logged what they show; or why not."""
    figures = {}
    if any(run.series("train/loss") or run.series("eval/loss") for run in runs):
        figures["loss curve", "loss.png"] = draw_losses(runs)
    else:
        print("\nno loss.png: no loss was logged")
    for number, run in enumerate(runs, 1):
        if casts := last_casts(run.records):
            name = "fp8_stats.png" if len(runs) == 1 else f"fp8_stats_{number}_{run.name}.png"
            figures["FP8 statistics", name] = draw_casts(run.name, *casts)
    try:
        target.mkdir(parents=True, exist_ok=True)
        for (_, name), figure in figures.items():
            figure.savefig(target / name, dpi=150)
    except OSError as error:
        return error.strerror
    for what, name in figures:
        print(f"\n{what}: {target / name}")
    return None


def main(argv: list[str] | None = None) -> int:
    """Print the table, write the figures; exit code 2 for a folder that is no run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    parser.add_argument(
        "--output_dir", type=Path, help="where figures go; default: the folder of a single run"
    )
    args = parser.parse_args(argv)
    try:
        runs = [read_run(folder) for folder in args.runs]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(runs))
    target = args.output_dir or (args.runs[0] if len(runs) == 1 else None)
    if target is None:
        print("\nno loss.png: several runs need --output_dir")
    elif error := write_figures(runs, target):
        print(f"error: --output_dir {target}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
