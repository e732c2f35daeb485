"""Table of records: one JSON line per run, with thinned curves, or per text that an experiment printed."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

from fp8_suite.benchmarks.records.runs import NO_EFFECT, RunRecord, Series, read_run, with_numbers
from fp8_suite.core.errors import bad_setting
from fp8_suite.core.files import replace_file, to_json
from fp8_suite.core.readers import read_json
from fp8_suite.training.tracking.metrics import METRICS

TABLE = Path(__file__).resolve().parents[1] / "results" / "records.jsonl.gz"
RECORD = "record.json"  # in a run folder: what a benchmark measured, with its printed `text`
MAX_POINTS = 200  # per curve
CURVES = ("train/loss", "train/grad_norm", "train/epoch", "perf/tokens_per_second", "perf/goodput")
DIGITS = 7  # significant digits of a value
ENVIRONMENT = (
    *("date", "git", "versions", "gpu_name", "gpu_count", "driver", "cuda", "cudnn", "python"),
    *("requested_recipe", "recipe", "fallback_reason", "te_backend", "emulated", "optimizer"),
    *("sharding_mode", "world_size", "nodes", "coverage", "data", "attention_backend", "flash_attention"),
    *("seconds_to_first_step", "seconds_by_phase"),
)
PRESET_OR_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")  # tiny-llama, meta-llama/Llama-3.2-1B
Row = dict[str, Any]


def read_table(study: str | None = None, path: Path = TABLE) -> list[RunRecord]:
    """Return the recorded runs of a study, or of all; `thousand_steps` includes `thousand_steps/te`."""
    return [from_row(row) for row in _read_study(study, path) if "text" not in row]


def read_texts(study: str, path: Path = TABLE) -> dict[str, str]:
    """Return the recorded texts of a study by name, such as profiles and printed measurements."""
    return {row["name"]: row["text"] for row in _read_study(study, path) if "text" in row}


def studies(path: Path = TABLE) -> list[str]:
    return sorted({row["study"] for row in _read_rows(path)})


def _read_study(study: str | None, path: Path) -> list[Row]:
    rows = _read_rows(path)
    if study is None:
        return rows
    selected = [row for row in rows if f"{row['study']}/".startswith(f"{study}/")]
    if not selected:
        raise bad_setting(f"no such study in {path}; choose from {', '.join(studies(path))}", study=study)
    return selected


def add_runs(folders: list[Path], study: str, path: Path = TABLE, *, model_name: str | None = None) -> None:
    """Add run folders to the table, as a text if they have a record.json.

    A run replaces the row with the same study and name. `model_name` names a model that was trained from a
    folder. UserError if it is missing, or if two runs have one name, because one of them would be lost.
    """
    by_name: dict[str, Path] = {}
    rows = {(row["study"], row["name"]): row for row in _read_rows(path)}
    for folder in folders:
        name = folder.resolve().name
        if (first := by_name.setdefault(name, folder)) != folder:
            raise bad_setting(f"{first} and {folder} have one name; use a study for each", study=study)
        if (folder / RECORD).exists():
            rows[study, name] = {"study": study, "name": name, **read_json(folder / RECORD), "remarks": {}}
            continue
        run = read_run(folder)
        model = model_name or run.value("model_name")
        if not PRESET_OR_HUB_ID.fullmatch(model):
            raise bad_setting(f"{folder} trained a model from a folder; name it", model_name=model)
        rows[study, name] = to_row(run, study, model)
    replace_file(path, gzip.compress(b"".join(to_json(row) + b"\n" for row in rows.values()), mtime=0))


def to_row(run: RunRecord, study: str, model_name: str) -> Row:
    """Convert a run to a row: settings that affect results, environment, summary and thinned metrics."""
    evaluations = sorted({name for record in run.records for name in record if name.startswith("eval/")})
    names = CURVES if run.summary else dict.fromkeys((*CURVES, *METRICS))  # a summary has the rest
    curves = {name: thin(run.logged(name), average=name == "train/loss") for name in names}
    curves |= {name: run.logged(name) for name in evaluations}
    named = {"model_name": model_name}
    return {
        "study": study,
        "name": run.name,
        "settings": {n: value for n, value in (run.config | named).items() if n not in NO_EFFECT},
        "environment": {name: run.environment[name] for name in ENVIRONMENT if name in run.environment},
        "summary": run.summary and run.summary | named,
        "metrics": {name: _columns(curve) for name, curve in curves.items() if curve},
        "remarks": run.remarks,
    }


def from_row(row: Row) -> RunRecord:
    """Convert a row to a run. Its folder, `study/name`, need not exist."""
    records: dict[int, dict[str, Any]] = {}
    for name, (steps, values) in row["metrics"].items():
        for step, value in zip(steps, values, strict=True):
            records.setdefault(step, {"step": step})[name] = value
    return RunRecord(
        folder=Path(row["study"]) / row["name"],
        config=row["settings"],
        environment=row["environment"],
        records=[with_numbers(records[step]) for step in sorted(records)],
        summary=with_numbers(row["summary"]) if row["summary"] else None,
        remarks=row["remarks"],
    )


def thin(series: Series, *, average: bool) -> Series:
    """Reduce a curve to at most MAX_POINTS: the mean or last value of every 1, 2, 5, 10, 20, ... points."""
    sizes = (digit * 10**power for power in range(9) for digit in (1, 2, 5))
    size = next(size for size in sizes if len(series) <= size * MAX_POINTS)
    blocks = [series[start : start + size] for start in range(0, len(series), size)]
    return [(b[-1][0], fmean(value for _, value in b) if average else b[-1][1]) for b in blocks]


def _columns(series: Series) -> list[list[float]]:
    return [[step for step, _ in series], [float(f"{value:.{DIGITS}g}") for _, value in series]]


def _read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]
