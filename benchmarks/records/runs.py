"""What run folders say, and what several of them say together: nothing here draws or formats."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from core.files import read_record
from core.redact import redacted
from training.config import SECTIONS, Config, all_settings
from training.tracking.metrics import perplexity

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # as metrics.jsonl writes them
# What an emulated run has no say about, under whichever name it was recorded.
SPEED = frozenset({"tokens_per_second", "model_tflops_per_gpu", "mfu_bf16", "mfu_fp8"})

Series = list[tuple[int, float]]  # (optimizer step, value)
# Settings that a step's work depends on, beside model and precision; runs older than one had its default.
WORK = ("max_seq_length", "batch_size", "gradient_accumulation_steps", "packing", "gradient_checkpointing")
WORK += ("compile", "master_weights", "moment_dtype", "grad_reduce_dtype", "precision_map", "fp8_lm_head")
WORK += ("fp8_fast_accumulation", "fp8_attention", "bf16_first_layers", "bf16_last_layers", "deterministic")
WORK += ("flash_attention", "fused_residuals", "fp8_fp32_scales", "fp8_weight_cache", "fp8_format")
# But for kernels, which runs that do not name them lacked.
BEFORE = {"flash_attention": False, "fused_residuals": False}
DEFAULT = Config().to_dict()
# Settings that no result depends on: runs into one folder may have others from start to start.
INDIFFERENT = ("num_workers", "num_proc", "weights_cache_dir", "data_cache_dir", "timeout_minutes")
INDIFFERENT += ("output_dir", "resume", "save_checkpoints", "save_interval", "keep_last", "export")
INDIFFERENT += ("generate_samples", "log_dir", "use_wandb", "wandb_project", "wandb_run_name", "wandb_mode")
INDIFFERENT += ("wandb_tags", "wandb_group")
EFFECTS = {n: f.metadata["affects"] or SECTIONS[s].affects for n, (s, f, _) in all_settings().items()}
NO_EFFECT = frozenset(name for name, effect in EFFECTS.items() if effect == "nothing")
LABEL_LENGTH = 100  # of a run's name in a figure or a heading
# What the config.json of every run has, and no other's.
OF_A_RUN = ("mixed_precision", "batch_size", "gradient_accumulation_steps", "max_seq_length")
COUNTS = OF_A_RUN[1:]
PARTS = ("coverage", "data", "versions", "git")  # of env.json


@dataclass(frozen=True)
class RunRecord:
    """What a run folder says; `summary` is None for a run that did not get to its end."""

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    records: list[dict[str, Any]]
    summary: dict[str, Any] | None
    wall_time: dict[str, Any] = field(default_factory=dict)  # of all starts; empty if missing or damaged
    remarks: dict[str, Any] = field(default_factory=dict)  # limits of a recorded run's use

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def setting(self, name: str) -> Any:
        """Of a run that is older than the setting, its default."""
        return self.config.get(name, DEFAULT[name])

    def logged(self, metric: str) -> Series:
        """Return (step, value) of every logged value."""
        return [(record["step"], record[metric]) for record in self.records if metric in record]

    def series(self, metric: str) -> Series:
        """(step, value) of every finite value logged."""
        found = [(record["step"], record[metric]) for record in self.records if metric in record]
        return [(s, value) for s, value in found if isinstance(value, int | float) and math.isfinite(value)]

    def value(self, name: str) -> Any:
        """A summary value by its name; of a run without summary what its other files tell, else None.

        None for the speed of an emulated run, which says nothing about any machine.
        """
        if name in SPEED and self.emulated:
            return None
        if self.summary is not None:
            return self.summary.get(name)
        if name in FROM_WALL_TIME:
            kept, unit = FROM_WALL_TIME[name]
            seconds = self.wall_time.get(kept)
            return seconds / unit if isinstance(seconds, int | float) else None
        return self.environment.get(name, self.config.get(name, self._from_metrics(name)))

    @property
    def emulated(self) -> bool:
        known = self.environment if self.summary is None else self.summary
        return bool(known.get("emulated"))

    @property
    def gpus(self) -> int:
        """GPUs of the whole job, 0 on a CPU; a run recorded before several could take part had one."""
        if self.summary is not None:
            return self.summary.get("gpus", 1)
        return self.environment.get("world_size", 1) if self.environment.get("gpu_name") else 0

    @property
    def nodes(self) -> int | None:
        """Machines of the job; None for a run that stopped before it counted them."""
        return self.environment.get("nodes") if self.summary is None else self.summary.get("nodes", 1)

    @property
    def mode(self) -> str | None:
        """How the run was sharded; config.json has what was asked for, perhaps `auto`."""
        known = self.summary or self.environment
        return known.get("sharding_mode", "single") if known else None

    @property
    def covered(self) -> dict[str, float]:
        """{precision: share of a step's GEMM FLOPs}; empty for a run that stopped before its first step."""
        shares: dict[str, float] = {}
        for row in (self.environment.get("coverage") or {}).get("rows", []):
            if row["gemm_share"]:
                shares[row["precision"]] = shares.get(row["precision"], 0.0) + row["gemm_share"]
        return shares

    @property
    def precision(self) -> str | None:
        """The recipe, else the mixed precision; under a precision map the recipes that GEMMs ran in."""
        recipe = self.value("recipe") or self.value("mixed_precision")
        if not self.config.get("precision_map"):
            return recipe
        by_share = sorted(self.covered, key=self.covered.__getitem__, reverse=True)
        found = [kind.removeprefix("fp8 ") for kind in by_share if kind.startswith("fp8 ")]
        return f"{' and '.join(found) or recipe} by map"

    @property
    def work(self) -> dict[str, Any]:
        """What two runs must share for their rates to be compared."""
        named = {"model_name": self.value("model_name"), "use_te": self.value("use_te")}
        settings = DEFAULT | BEFORE | self.config
        return named | {"precision": self.precision} | {name: settings[name] for name in WORK}

    @property
    def tokens_per_gpu(self) -> float | None:
        """Tokens/s of one GPU."""
        rate = self.value("tokens_per_second")
        return rate / self.gpus if rate is not None and self.gpus else None

    @property
    def ranks(self) -> int:
        """Processes of the whole job."""
        found = (self.summary or {}).get("world_size") or self.environment.get("world_size") or self.gpus
        return max(1, found)

    @property
    def global_batch(self) -> int:
        """Rows of one optimizer step over all ranks."""
        return self.config["batch_size"] * self.config["gradient_accumulation_steps"] * self.ranks

    def _from_metrics(self, name: str) -> Any:
        if name == "steps":
            return self.records[-1]["step"] if self.records else 0
        metric, reduce = FROM_METRICS.get(name, (None, None))
        values = [value for _, value in self.series(metric)] if metric else []
        return reduce(values) if values else None


def find_runs(folder: Path) -> list[Path]:
    """Return `folder` if it is a run's, else the run folders below it."""
    return [folder] if (folder / "config.json").exists() else run_folders(folder)


def run_folders(folder: Path) -> list[Path]:
    """The folders of all runs below `folder`."""
    found = [path.parent for path in folder.rglob("config.json")]
    return sorted(path for path in found if (path / "metrics.jsonl").exists())


def read_run(folder: Path) -> RunRecord:
    """Read a run folder; ValueError if it is none, or holds a broken file."""
    if not folder.exists():
        raise ValueError(f"{folder}: there is no such folder")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: not a run folder (it has no config.json)")
    config = _read_json(folder / "config.json")
    if missing := next((name for name in OF_A_RUN if name not in config), None):
        raise ValueError(f"{folder}: not a run folder (its config.json has no {missing})")
    if wrong := next((name for name in COUNTS if not isinstance(config[name], int)), None):
        raise ValueError(f"{folder}: not a run folder ({wrong} of its config.json is {config[wrong]!r})")
    summary, env = folder / "summary.json", folder / "env.json"
    environment = _read_json(env) if env.exists() else {}
    if wrong := next((n for n in PARTS if not isinstance(environment.get(n), dict | None)), None):
        raise ValueError(f"{env}: not of a run ({wrong} is {environment[wrong]!r})")
    return RunRecord(
        folder=folder,
        config=config,
        environment=environment,
        records=_read_metrics(folder / "metrics.jsonl"),
        summary=_read_json(summary) if summary.exists() else None,
        wall_time=read_record(folder / "wall_time.json"),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return with_numbers(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """The logged lines; a run that is being written, or was killed, may end in half a line."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            record = with_numbers(json.loads(line))
        except ValueError:
            continue
        if not isinstance(record.get("step"), int):
            raise ValueError(f"{path}: a line is none of a run: {line[:80]}")
        records.append(record)
    return records


def with_numbers(values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ValueError(f"holds a {type(values).__name__}, no object")
    return {k: NON_FINITE.get(v, v) if isinstance(v, str) else v for k, v in values.items()}


def tail_mean(values: list[float]) -> float:
    """Mean of the last 10 % (at least one value)."""
    return fmean(values[-max(1, len(values) // 10) :])


def _after_warmup(values: list[float]) -> float:
    return median(values[1:] or values)  # the first line holds compilation


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

# Summary value -> (its name in wall_time.json, seconds of its unit), for runs that left no summary.
FROM_WALL_TIME = {
    "runtime_seconds": ("wall_seconds", 1),
    "gpu_hours": ("gpu_seconds", 3600),
    "node_hours": ("node_seconds", 3600),
}

LOSSES = {"training": "train/loss", "validation": "eval/loss"}
STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "maximum": max,
    "minimum": min,
    "mean": fmean,
    "final": lambda values: values[-1],
    "standard deviation": pstdev,
    "mean of last 10 %": tail_mean,
}


def smooth(values: list[float], share: int = 20) -> list[float]:
    """Centred moving mean over about 1 / share of the values; the window narrows evenly towards both ends."""
    most = len(values) // (2 * share)
    halves = [min(most, i, len(values) - 1 - i) for i in range(len(values))]
    # In whole multiples of the smallest double: of floats one huge loss would blur all later sums.
    ratios = map(float.as_integer_ratio, map(float, values))
    sums = [0, *accumulate(above << (1075 - below.bit_length()) for above, below in ratios)]
    return [(sums[i + half + 1] - sums[i - half]) / ((2 * half + 1) << 1074) for i, half in enumerate(halves)]


def labels(runs: list[RunRecord]) -> list[str]:
    """A name for each run: its folder's, or where two share that, the path as given."""
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 else str(run.folder) for name, run in zip(names, runs, strict=True)
    ]


def short_labels(runs: list[RunRecord]) -> list[str]:
    """Labels of at most LABEL_LENGTH characters, cut in the middle; whole ones where two would be alike."""
    names, half = labels(runs), LABEL_LENGTH // 2 - 2
    short = [name if len(name) <= LABEL_LENGTH else f"{name[:half]}...{name[-half:]}" for name in names]
    return short if len(set(short)) == len(set(names)) else names


PACKAGES = ("torch", "transformer_engine", "torchao", "transformers")


def provenance(run: RunRecord, *, date: bool = True) -> str:
    """GPUs, date, versions and commit, from env.json."""
    environment = run.environment
    if not environment:
        return "stopped before it looked at the machine"
    versions, git = environment.get("versions") or {}, environment.get("git")
    machine = environment.get("gpu_name") or "CPU"
    parts = [f"{run.gpus} x {machine}" if run.gpus else machine]
    parts += [environment.get("date", "no date")[:10]] if date else []
    parts += [f"{name} {versions[name]}" for name in PACKAGES if versions.get(name)]
    if git:
        parts.append(f"commit {git['commit'][:12]}{' with changes' if git['dirty'] else ''}")
    return ", ".join(parts)


MACHINE = (
    "gpu_name",
    "driver",
    "cuda",
    "cudnn",
    "python",
    "platform",
    "recipe",
    "fallback_reason",
    "optimizer",
)
MACHINE += ("attention_backend", "emulated", "sharding_mode", "world_size", "nodes")


def settings(run: RunRecord) -> dict[str, Any]:
    """Everything a run was set to: its configuration, then what it ran on and with."""
    environment = run.environment
    git = environment.get("git") or {}
    return (
        redacted(run.config)
        | {name: environment.get(name) for name in MACHINE}
        | {f"version of {name}": value for name, value in (environment.get("versions") or {}).items()}
        | {"commit": git.get("commit"), "commit with changes": git.get("dirty")}
    )
