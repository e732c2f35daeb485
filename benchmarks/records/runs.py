"""Run records: settings, environment, metrics and summary of one run, read from its folder."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from fp8_suite.benchmarks.records.evaluation import Result, read_results
from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError
from fp8_suite.core.readers import UnreadableFile, read_json, read_record
from fp8_suite.training.config import SECTIONS, Config, all_settings, settings_path
from fp8_suite.training.parallel.settings import AXES, ONLY_WITH, recorded_data_ranks
from fp8_suite.training.tracking.metrics import METRICS, RATES, WALL_RATES, summary_name, tail_mean
from fp8_suite.training.tracking.tracker import read_lines

Series = list[tuple[int, float]]  # (optimizer step, value)

DEFAULT = Config().to_dict()
EFFECTS = {
    name: setting.field.metadata["affects"] or SECTIONS[setting.section].affects
    for name, setting in all_settings().items()
}
NO_EFFECT = frozenset(name for name, effect in EFFECTS.items() if effect == "nothing")
# These may be `auto` or fall back, so `RunRecord.work` compares what actually ran.
RESOLVED = {"model_name", "use_te", "te_backend", "mixed_precision", "fp8_scenario", "fp8_fallback"}
# Scaling compares one GPU, without sharding, with several GPUs.
SHARDING = {"sharding_mode", "deepspeed_config", "offload_optimizer", "hsdp_shard_size"}
SHARDING |= {*AXES.values(), *ONLY_WITH}
# Other settings that change the work of a step; equal in runs whose speeds are comparable.
WORK = tuple(n for n, effect in EFFECTS.items() if effect == "step" and n not in RESOLVED | SHARDING)

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def bad_input(message: str) -> UserError:
    """Return the error for a file or flag that the user must correct."""
    return UserError(message, exit_code=EXIT_BAD_SETTING)


REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "last": lambda values: values[-1],
    "median": lambda values: median(values[1:] or values),  # the first interval includes compilation
    "max": max,
}
# Summary value -> (metric, reduction), for runs without a summary.
FROM_METRICS = {
    summary_name(name): (name, REDUCTIONS[metric.summary])
    for name, metric in METRICS.items()
    if metric.summary
} | {"train_loss_tail_mean": ("train/loss", tail_mean)}
# Summary value -> (key in wall_time.json, seconds per unit), for runs without a summary.
FROM_WALL_TIME = {
    "runtime_seconds": ("wall_seconds", 1),
    "gpu_hours": ("gpu_seconds", 3600),
    "node_hours": ("node_seconds", 3600),
}
SPEED = frozenset(map(summary_name, (*RATES, *WALL_RATES))) - {"data_wait_share"}


@dataclass(frozen=True, eq=False)  # keys of dicts, by identity
class RunRecord:
    """One run, from its folder or from the table of recorded runs; `summary` is None if it did not finish."""

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    records: list[dict[str, Any]]
    summary: dict[str, Any] | None
    wall_time: dict[str, Any] = field(default_factory=dict)  # summed over restarts
    remarks: dict[str, Any] = field(default_factory=dict)  # limits of a recorded run; see results/README.md
    evaluation: list[Result] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def setting(self, name: str) -> Any:
        """Return a setting; its default if the run is older than the setting."""
        return self.config.get(name, DEFAULT[name])

    def logged(self, metric: str) -> Series:
        """Return (step, value) of every logged value."""
        return [(record["step"], record[metric]) for record in self.records if metric in record]

    def series(self, metric: str) -> Series:
        """Return (step, value) of every finite logged value."""
        return [(step, value) for step, value in self.logged(metric) if math.isfinite(value)]

    def value(self, name: str) -> Any:
        """Return a value of summary.json, or compute it from an unfinished run's logs; None if unknown.

        The speed of a run that is not `timed` is None, because it is meaningless.
        """
        if name in SPEED and not self.timed:
            return None
        if self.summary is not None:
            return self.summary.get(name)
        if name in FROM_WALL_TIME:
            key, unit = FROM_WALL_TIME[name]
            seconds = self.wall_time.get(key)
            return None if seconds is None else seconds / unit
        if name == "steps":
            return self.records[-1]["step"] if self.records else 0
        if name in FROM_METRICS:
            metric, reduce = FROM_METRICS[name]
            values = [value for _, value in self.series(metric)]
            return reduce(values) if values else None
        return self.environment.get(name, self.config.get(name))

    @property
    def emulated(self) -> bool:
        return bool((self.summary or self.environment).get("emulated"))

    @property
    def gpus(self) -> int:
        """Number of GPUs of the whole job; 0 on a CPU."""
        if self.summary is not None:
            return self.summary.get("gpus", 1) or 0
        return self.environment.get("world_size", 1) if self.environment.get("gpu_name") else 0

    @property
    def timed(self) -> bool:
        """True if its speed is meaningful: it ran on GPUs, without emulation."""
        return bool(self.gpus) and not self.emulated

    @property
    def nodes(self) -> int | None:
        return (self.summary or self.environment).get("nodes", 1 if self.summary else None)

    @property
    def mode(self) -> str | None:
        """Sharding mode that ran, also if its settings say `auto`; None if unknown."""
        known = self.summary or self.environment
        return known.get("sharding_mode", "single") if known else None

    @property
    def ranks(self) -> int:
        """World size; 1 on a CPU."""
        known = (self.summary or {}).get("world_size") or self.environment.get("world_size")
        return max(1, known or self.gpus)

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step over all ranks, at the end of a ramp."""
        data_ranks = recorded_data_ranks(self.config, self.ranks)
        return self.config["batch_size"] * self.config["gradient_accumulation_steps"] * data_ranks

    @property
    def coverage(self) -> dict[str, float]:
        """Share of a step's GEMM FLOPs by precision; empty if not recorded."""
        shares: dict[str, float] = {}
        for row in (self.environment.get("coverage") or {}).get("rows", []):
            if row["gemm_share"]:
                shares[row["precision"]] = shares.get(row["precision"], 0.0) + row["gemm_share"]
        return shares

    @property
    def precision(self) -> str | None:
        """Recipe, bf16, fp16 or fp32; with --precision_map, all recipes in use, largest GEMM share first."""
        recipe = self.value("recipe") or self.value("mixed_precision")
        if not self.config.get("precision_map"):
            return recipe
        by_share = sorted(self.coverage, key=self.coverage.__getitem__, reverse=True)
        recipes = [kind.removeprefix("fp8 ") for kind in by_share if kind.startswith("fp8 ")]
        return f"{' and '.join(recipes) or recipe} by map"

    @property
    def layers(self) -> str:
        return "TE" if self.value("use_te") else "HF"

    @property
    def work(self) -> dict[str, Any]:
        """Properties that are equal in runs whose speeds are comparable."""
        named = {"model_name": self.value("model_name"), "layers": self.layers, "precision": self.precision}
        return named | {name: self.setting(name) for name in WORK}

    @property
    def wall_shares(self) -> dict[str, float]:
        """Share of the wall time by kind; empty if not recorded, or if the run is not `timed`."""
        seconds = (self.summary or {}).get("wall_seconds_by_kind") or self.wall_time.get("seconds_by_kind")
        if not seconds or not self.timed:
            return {}
        total = sum(seconds.values())
        return {kind: value / total for kind, value in seconds.items()}

    @property
    def tokens_per_gpu(self) -> float | None:
        """Tokens/s per GPU."""
        rate = self.value("tokens_per_second")
        return rate / self.gpus if rate is not None and self.gpus else None


def find_runs(folder: Path) -> list[Path]:
    """Return all run folders below a folder, or [folder] if there is none or it is one itself."""
    if settings_path(folder).exists():
        return [folder]
    folders = [path.parent for path in folder.rglob("metrics.jsonl")]
    return sorted(path for path in folders if settings_path(path).exists()) or [folder]


def read_run(folder: Path) -> RunRecord:
    """Read a run folder. UserError if it is no run folder or one of its files is damaged."""
    settings = settings_path(folder)
    if not settings.is_file():
        reason = "not a run folder (it has no settings.json)" if folder.exists() else "no such folder"
        raise bad_input(f"{folder}: {reason}")
    summary, environment = (
        read_values(folder / name) if (folder / name).exists() else None
        for name in ("summary.json", "env.json")
    )
    return RunRecord(
        folder=folder,
        config=read_values(settings),
        environment=environment or {},
        records=_read_metrics(folder / "metrics.jsonl"),
        summary=summary,
        wall_time=read_record(folder / "wall_time.json"),
        evaluation=read_results(folder, (summary or {}).get("steps")),
    )


def with_numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Replace "NaN", "Infinity" and "-Infinity", as strict JSON stores them, with floats."""
    return {k: NON_FINITE.get(v, v) if isinstance(v, str) else v for k, v in values.items()}


def read_values(path: Path) -> dict[str, Any]:
    """Read settings.json, summary.json or env.json. UserError if it is damaged."""
    try:
        return with_numbers(read_json(path))
    except UnreadableFile as error:
        raise bad_input(f"{path}: damaged ({error.reason}); restore or delete it") from None


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl, without the partial last line of a running or killed run."""
    records = (with_numbers(record) for _, record in read_lines(path))
    return [{k: v for k, v in record.items() if isinstance(v, int | float)} for record in records]
