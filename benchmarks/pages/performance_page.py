"""Writes docs/performance.md's tables and README's from recorded measurements; the rest of a page stays.

    python -m benchmarks.performance_page

reads benchmarks/results/throughput.jsonl (`benchmarks.throughput`) and every peer-*.json below
benchmarks/results (`benchmarks.peers`), and replaces what is between a page's two markers. Runs of the same
settings are one row, with the median of each column over those of the newest commit; ratios are between runs
of one commit where there are such.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.records.launch import ROOT, flag, run_command
from benchmarks.records.runs import PACKAGES
from benchmarks.report.markdown import table
from core.cli import OneLineParser

RESULTS = ROOT / "benchmarks" / "results"
PAGE, README = ROOT / "docs" / "performance.md", ROOT / "README.md"
BEGIN = "<!-- tables: written by python -m benchmarks.performance_page; do not edit -->"
README_BEGIN = "<!-- speed: written by python -m benchmarks.performance_page; do not edit -->"
END = "<!-- end of tables -->"

# What a table's rows share, what a row and its BF16 baseline share beyond that, what makes a row.
TABLE = ("gpu_name", "gpus", "model_name", "num_layers", "max_seq_length", "dataset")
SHAPE = ("batch_size", "gradient_accumulation_steps")
ROW = (*SHAPE, "stack", "precision", "packing", "sharding_mode", "moment_dtype", "master_weights", "options")
# What a run on many GPUs shares with the one on a single GPU that it is held against.
ALONE = tuple(name for name in (*TABLE, *ROW) if name not in ("gpus", "sharding_mode"))
OURS = "this suite"
# Flags that columns or the table's heading tell already; a row's options are the others.
TOLD = {*TABLE, *SHAPE, *ROW, "use_te", "mixed_precision", "fp8_scenario", "fp8_lm_head"}
TOLD |= {"init", "tokenizer_name", "dataset_name", "split_name", "output_dir"}
TOLD |= {"num_workers", "num_proc", "data_cache_dir"}


def from_throughput(line: dict[str, Any]) -> dict[str, Any]:
    """A line of throughput.jsonl with the columns of this page."""
    layers = "TE" if line["use_te"] else "HF"
    mixed, recipe = line["mixed_precision"], line["recipe"]
    fp8_head = line["settings"].get("fp8_lm_head", False)
    options = {name: value for name, value in line["settings"].items() if name not in TOLD}
    return line | {
        "stack": OURS,
        "precision": f"{mixed.upper()}{f' {recipe}' if recipe != mixed else ''}, {layers} layers"
        + ", FP8 LM head" * fp8_head,
        "fp8_head": fp8_head,
        "layers": layers,
        "bf16": mixed == "bf16",
        "options": shlex.join(flag(name, value) for name, value in sorted(options.items())),
        "padded": line["padded_tokens_per_second_per_gpu"],
    }


def from_peer(found: dict[str, Any]) -> dict[str, Any]:
    """A record of benchmarks.peers with the columns of this page."""
    settings, precision = found["settings"], found["settings"]["precision"]
    flags = {"gradient_checkpointing": settings["gradient_checkpointing"], "eager": settings["no_compile"]}
    return {
        **{name: settings[name] for name in ("model_name", "num_layers", "max_seq_length", "batch_size")},
        "gpu_name": found["gpu"],
        "gpus": 1,
        "dataset": "synthetic",
        "gradient_accumulation_steps": 1,
        "stack": found["stack"],
        "precision": "BF16" if precision == "bf16" else f"FP8 {precision}",
        "layers": found["stack"].split(" + ")[0],
        "bf16": precision == "bf16",
        "packing": True,
        "sharding_mode": "single",
        "moment_dtype": "bf16",
        "master_weights": "none",
        "options": ", ".join(name for name, on in flags.items() if on),
        "tokens_per_second_per_gpu": found["tokens_per_second"],
        "padded": found["tokens_per_second"],
        "model_tflops_per_gpu": found.get("model_tflops"),
        "mfu_bf16": found.get("mfu_bf16"),
        **{name: found[name] for name in ("peak_memory_gb", "versions", "date")},
    }


@dataclass(frozen=True)
class Row:
    """Runs of the same settings, of which those of the newest code count."""

    found: list[dict[str, Any]]
    alone: Row | None = None  # the same on one GPU

    @property
    def runs(self) -> list[dict[str, Any]]:
        """Those of the code that the last one ran, so that a row mixes no two states of it."""
        return self.of(self.found[-1].get("commit"))

    def of(self, commit: str | None) -> list[dict[str, Any]]:
        return [run for run in self.found if run.get("commit") == commit]

    def __getitem__(self, name: str) -> Any:
        return self.runs[0].get(name)

    def median(self, name: str, commit: str | None = None) -> float | None:
        """Over the runs of `commit`, if there are any, or of the newest code."""
        runs = (self.of(commit) if commit else []) or self.runs
        values = [run[name] for run in runs if run.get(name) is not None]
        return median(values) if values else None


def settings_of(run: dict[str, Any], names: tuple[str, ...]) -> tuple:
    return tuple(run.get(name) for name in names)


def grouped(runs: Iterable[dict[str, Any]], names: tuple[str, ...]) -> list[list[dict[str, Any]]]:
    """Runs that agree in `names`, in the order of their first one."""
    groups: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        groups[settings_of(run, names)].append(run)
    return list(groups.values())


def ratio(row: Row, rows: list[Row], is_baseline: Callable[[Row], bool]) -> str:
    """Useful tokens/s against the fastest baseline of the same micro-batch and accumulation.

    A baseline that ran the row's code too is taken from those runs, though there are newer ones.
    """
    of_shape = [r for r in rows if is_baseline(r) and all(r[name] == row[name] for name in SHAPE)]
    rates = [r.median("tokens_per_second_per_gpu", row["commit"]) for r in of_shape]
    return f"{row.median('tokens_per_second_per_gpu') / max(rates):.2f}x" if rates else "-"


def against_bf16(row: Row, rows: list[Row]) -> str:
    same = ("stack", "layers", "packing") if row["stack"] == OURS else ("layers",)
    return ratio(row, rows, lambda r: r["bf16"] and all(r[name] == row[name] for name in same))


def against_padded(row: Row, rows: list[Row]) -> str:
    return ratio(row, rows, lambda r: r["bf16"] and not r["packing"] and r["layers"] == "HF")


def scaling(row: Row, _: list[Row]) -> str:
    if row.alone is None:
        return "-"
    alone = row.alone.median("tokens_per_second_per_gpu", row["commit"])
    return f"{row.median('tokens_per_second_per_gpu') / alone:.1%}"


def shown(format_: str, *names: str) -> Callable[[Row, list[Row]], str]:
    def cell(row: Row, _: list[Row]) -> str:
        values = [row.median(name) for name in names]
        return " / ".join("-" if value is None else format_.format(value) for value in values)

    return cell


def state(settings: Row | dict[str, Any]) -> str:
    masters = {"fp32": "FP32 masters", "none": "no masters"}[settings["master_weights"]]
    return f"{masters}, {settings['moment_dtype'].upper()} moments"


COLUMNS: dict[str, Callable[[Row, list[Row]], str]] = {
    "stack": lambda row, _: row["stack"],
    "precision": lambda row, _: row["precision"],
    "batch": lambda row, _: " x ".join(str(row[name]) for name in SHAPE),
    "rows": lambda row, _: "packed" if row["packing"] else "padded",
    "mode": lambda row, _: f"`{row['sharding_mode']}`",
    "optimizer state": lambda row, _: state(row),
    "options": lambda row, _: f"`{row['options']}`" if row["options"] else "-",
    "tokens/s per GPU": shown("{:,.0f}", "tokens_per_second_per_gpu"),
    "with padding": shown("{:,.0f}", "padded"),
    "against BF16": against_bf16,
    "against padded BF16, HF layers": against_padded,
    "scaling": scaling,
    "TFLOP/s": shown("{:,.0f}", "model_tflops_per_gpu"),
    "MFU of BF16 / FP8 peak": shown("{:.1%}", "mfu_bf16", "mfu_fp8"),
    "peak GB": shown("{:.1f}", "peak_memory_gb"),
    "data wait": shown("{:.2%}", "data_wait_share"),
    "s to first step": shown("{:.0f}", "seconds_to_first_step"),
    "runs": lambda row, _: str(len(row.runs)),
}
# Columns that only say something where some row is padded, or spread over several GPUs.
ONLY: dict[str, Callable[[Row], bool]] = {
    "rows": lambda row: not row["packing"],
    "with padding": lambda row: not row["packing"],
    "against padded BF16, HF layers": lambda row: not row["packing"],
    "mode": lambda row: row["gpus"] > 1,
    "scaling": lambda row: row["gpus"] > 1,
}


def tables(runs: list[dict[str, Any]]) -> str:
    """Markdown: a heading and a table for every model, length, data and number of GPUs."""
    single = grouped((run for run in runs if run["gpus"] == 1), ALONE)
    alone = {settings_of(group[0], ALONE): Row(group) for group in single}
    return "\n\n".join(part for group in grouped(runs, TABLE) for part in section(group, alone))


def section(runs: list[dict[str, Any]], alone: dict[tuple, Row]) -> list[str]:
    """Heading, table, profiles if there are any, and where it all comes from.

    `alone`: rows on one GPU by the settings `ALONE`.
    """
    rows = [Row(group, alone.get(settings_of(group[0], ALONE))) for group in grouped(runs, ROW)]
    names = [name for name in COLUMNS if name not in ONLY or any(map(ONLY[name], rows))]
    about = runs[0]
    machine = f"{about['gpus']} x {about['gpu_name']}" if about["gpu_name"] else "CPU"
    model = f"{about['model_name']}, {about['num_layers']} layers, {about['max_seq_length']:,} tokens"
    made = [f"### {model}, {about['dataset']} data, {machine}"]
    made.append(table(names, [[COLUMNS[name](row, rows) for name in names] for row in rows]))
    if profiled := [row for row in rows if row["profile"]]:
        kinds = [f"- {row['precision']}: {profile(row['profile'])}" for row in profiled]
        made.append("\n".join(["GPU time of a step by kind of kernel, ms:", "", *kinds]))
    return [*made, provenance([run for row in rows for run in row.runs])]


BRIEF = {
    "model, tokens a sequence": lambda row, _: (
        f"{row['model_name'].split('/')[-1]}, {row['max_seq_length']:,}"
    ),
    "stack": COLUMNS["stack"],
    "precision": COLUMNS["precision"],
    "optimizer state": COLUMNS["optimizer state"],
    "micro-batch x accumulation": COLUMNS["batch"],
    "tokens/s": COLUMNS["tokens/s per GPU"],
    "TFLOP/s": COLUMNS["TFLOP/s"],
    "against BF16": against_bf16,
    "peak GB": COLUMNS["peak GB"],
}


def overview(runs: list[dict[str, Any]]) -> str:
    """Markdown: of every model, length and data on one GPU, each stack's fastest in BF16, in FP8, and in FP8
    with the LM head, which costs some loss.
    """
    lines = []
    alone = [run for run in runs if run["gpus"] == 1]
    for group in grouped(alone, TABLE):
        rows = [Row(same) for same in grouped(group, ROW)]
        fastest: dict[tuple, Row] = {}
        for row in sorted(rows, key=lambda row: -row.median("tokens_per_second_per_gpu")):
            kind = row["stack"].split(" + ")[0], row["bf16"], bool(row["fp8_head"])
            fastest.setdefault(kind, row)
        lines += [[cell(row, rows) for cell in BRIEF.values()] for row in fastest.values()]
    return table(list(BRIEF), lines)


def profile(found: dict[str, Any]) -> str:
    kinds = ", ".join(f"{kind} {of['ms']:.1f}" for kind, of in found["kinds"].items())
    return f"{found['step_ms']:.1f} ({kinds})"


def provenance(runs: list[dict[str, Any]]) -> str:
    """When, with which versions and from which commits."""
    days = sorted({run["date"][:10] for run in runs})
    parts = [days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"]
    for package in PACKAGES:
        found = sorted({run["versions"][package] for run in runs if run["versions"].get(package)})
        parts += [f"{package} {' and '.join(found)}"] if found else []
    commits = sorted(
        {run["commit"][:12] + " with changes" * bool(run["dirty"]) for run in runs if run.get("commit")}
    )
    return ", ".join(parts + ([f"commit {' and '.join(commits)}"] if commits else [])) + "."


def read_runs(throughput: Path, peers: Path) -> list[dict[str, Any]]:
    """All measurements, ours first. ValueError for a broken file, or where there is none at all."""
    lines = throughput.read_text(encoding="utf-8").splitlines() if throughput.exists() else []
    runs = [from_throughput(parsed(line, f"{throughput}:{n}")) for n, line in enumerate(lines, 1) if line]
    for path in sorted(peers.rglob("peer-*.json")):
        runs.append(from_peer(parsed(path.read_text(encoding="utf-8"), str(path))))
    if not runs:
        raise ValueError(
            f"{throughput}, {peers}: no measurement there; python -m benchmarks.throughput makes some"
        )
    return runs


def parsed(text: str, place: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{place}: cannot be read ({error})") from None


def replaced(page: str, made: str, path: Path, begin: str = BEGIN) -> str:
    """`page` with `made` between `begin` and `END`. ValueError unless each stands there once, in order."""
    before, found, rest = page.partition(begin)
    _, end, after = rest.partition(END)
    if not (found and end) or begin in rest or END in before + after:
        raise ValueError(f"{path}: must hold these two lines once, in this order: {begin} and {END}")
    return f"{before}{begin}\n\n{made}\n\n{END}{after}"


def write_pages(argv: list[str]) -> int:
    parser = OneLineParser(prog="python -m benchmarks.performance_page", description=__doc__.split("\n")[0])
    parser.add_argument("--throughput", type=Path, default=RESULTS / "throughput.jsonl", metavar="FILE")
    parser.add_argument("--peers", type=Path, default=RESULTS, metavar="FOLDER", help="holds peer-*.json")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE")
    parser.add_argument("--readme", type=Path, default=README, metavar="FILE")
    arguments = parser.parse_args(argv)
    runs = read_runs(arguments.throughput, arguments.peers)
    made = [(arguments.page, tables(runs), BEGIN), (arguments.readme, overview(runs), README_BEGIN)]
    pages = {p: replaced(p.read_text(encoding="utf-8"), text, p, begin) for p, text, begin in made}
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Rewrite the page's tables; exit code 2 where something cannot be read."""
    return run_command(write_pages, argv)


if __name__ == "__main__":
    sys.exit(main())
