"""Writes the tables of docs/studies from recorded run folders; the rest of each page stays as it is.

    python -m benchmarks.study_page [--record STUDY FOLDER]

reads every run folder below benchmarks/results/<study> and replaces what is between the two markers of
docs/studies/<study>.md. `--record` first copies the runs below FOLDER there, as `record` says.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pages.performance_page import RESULTS, ROOT, provenance, replaced
from benchmarks.pages.study_tables import (
    Against,
    baseline,
    batch_one,
    fsdp_finetuning,
    nearest_baseline,
    notes,
    thousand_steps,
)
from benchmarks.records.launch import run_command
from benchmarks.records.runs import RunRecord, read_run, run_folders
from core.cli import OneLineParser

PAGES = ROOT / "docs" / "studies"
BEGIN = "<!-- tables: written by python -m benchmarks.study_page; do not edit -->"

# What a recorded metrics.jsonl keeps of a line beside evaluations; rates are in summary.json, as medians.
RECORDED = ("step", "train/loss", "train/grad_norm", "train/epoch")


@dataclass(frozen=True)
class Study:
    """A page of docs/studies: the command that its runs begin with, and what makes its tables."""

    command: str
    tables: Callable[[list[RunRecord]], list[str]]
    against: Against = baseline  # the BF16 run that a run is held against


# What makes delayed scaling fast, as a variant of `benchmarks.compare` says it.
FAST = "fp8_fast_accumulation+moment_dtype=bf16+batch_size=1+gradient_accumulation_steps=2"
FAST += "+grad_reduce_dtype=bf16"

STUDIES = {
    "batch_one": Study(
        "python -m benchmarks.sweep benchmarks/sweeps/batch_one.yaml --dataset_name openmath_gsm8k", batch_one
    ),
    "fsdp_finetuning": Study(
        "python -m benchmarks.sweep benchmarks/sweeps/fsdp_finetuning.yaml --dataset_name openmath_gsm8k",
        fsdp_finetuning,
    ),
    "thousand_steps": Study(
        "python -m benchmarks.compare --variants bf16,delayed,current,block,block+fp8_fp32_scales,"
        f"delayed+fp8_lm_head,delayed+fp8_fast_accumulation,delayed+{FAST},delayed+fp8_lm_head+{FAST} "
        "--output_dir runs/thousand_steps/te --model_name meta-llama/Llama-3.2-1B --init random "
        "--tokenizer_name demo --dataset_name openmath_gsm8k --eval_split test --eval_samples 1319 "
        "--batch_size 2 --max_seq_length 1024 --learning_rate 1e-4 --max_steps 1000 --no_save_checkpoints",
        thousand_steps,
        nearest_baseline,
    ),
}


def where_from(runs: list[RunRecord]) -> list[str]:
    """Days, versions and commits of the runs, from env.json."""
    known = []
    for environment in (run.environment for run in runs if run.environment):
        git = environment.get("git") or {}
        found = {"commit": git.get("commit"), "dirty": git.get("dirty")}
        known.append(found | {name: environment[name] for name in ("date", "versions")})
    return [provenance(known)] if known else []


def tables(study: Study, runs: list[RunRecord]) -> str:
    """Markdown of a page's part between the markers."""
    if not runs:
        return f"Not run yet: `{study.command}`"
    return "\n\n".join([*study.tables(runs), *notes(runs, study.against), *where_from(runs)])


def record(source: Path, target: Path) -> list[Path]:
    """Copy the runs below `source`: settings, environment, summary, and of metrics.jsonl losses to 7 digits.

    Returns the copies. A `runs` folder on the way is left out of their paths. ValueError if there is no run.
    """
    folders = run_folders(source)
    if not folders:
        raise ValueError(
            f"--record {target.name} {source}: no run folder below it; give a sweep's --output_dir"
        )
    copies = []
    for folder in folders:
        copy = target.joinpath(*(part for part in folder.relative_to(source).parts if part != "runs"))
        refuse_another(folder, copy)
        copy.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "env.json", "summary.json"):
            if (folder / name).exists():
                shutil.copy(folder / name, copy / name)
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        (copy / "metrics.jsonl").write_text("".join(map(losses_alone, lines)), encoding="utf-8")
        copies.append(copy)
    return copies


def refuse_another(folder: Path, copy: Path) -> None:
    """ValueError if what is recorded under this name is a run of other settings."""
    if not (copy / "config.json").exists():
        return
    old, new = (json.loads((f / "config.json").read_text(encoding="utf-8")) for f in (copy, folder))
    own = ("output_dir", "resume")
    different = sorted(n for n in old.keys() | new.keys() if n not in own and old.get(n) != new.get(n))
    if different:
        raise ValueError(
            f"--record: {copy} is recorded already, with other settings ({', '.join(different)}); remove it, "
            "or give the runs another name"
        )


def losses_alone(line: str) -> str:
    """What is recorded of a line of metrics.jsonl; nothing of a half one, with which a killed run ends."""
    try:
        logged = json.loads(line)
    except ValueError:
        return ""
    kept = {name: v for name, v in logged.items() if name in RECORDED or name.startswith("eval/")}
    kept = {name: float(f"{v:.7g}") if isinstance(v, float) else v for name, v in kept.items()}
    return json.dumps(kept) + "\n"


def write_pages(argv: list[str]) -> int:
    parser = OneLineParser(prog="python -m benchmarks.study_page", description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="holds <study>/")
    parser.add_argument("--pages", type=Path, default=PAGES, metavar="FOLDER", help="holds <study>.md")
    parser.add_argument(
        "--record",
        nargs=2,
        action="append",
        default=[],
        metavar=("STUDY", "FOLDER"),
        help=f"first copy the runs below FOLDER into --results; a study is one of {', '.join(STUDIES)}",
    )
    arguments = parser.parse_args(argv)
    for name, folder in arguments.record:
        if name not in STUDIES:
            raise ValueError(f"--record {name}: no such study; there are {', '.join(STUDIES)}")
        copies = record(Path(folder), arguments.results / name)
        print(f"{name}: {len(copies)} runs recorded in {arguments.results / name}")
    for name, study in STUDIES.items():
        runs = [read_run(folder) for folder in run_folders(arguments.results / name)]
        path = arguments.pages / f"{name}.md"
        page = replaced(path.read_text(encoding="utf-8"), tables(study, runs), path, begin=BEGIN)
        path.write_text(page, encoding="utf-8")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Rewrite all pages' tables; exit code 2 where something cannot be read."""
    return run_command(write_pages, argv)


if __name__ == "__main__":
    sys.exit(main())
