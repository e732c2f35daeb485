"""Figures in tables of README and docs are those of the recorded studies that the pages name."""

import itertools
import re
from functools import cache
from statistics import fmean, median
from typing import NamedTuple

import pytest
from fp8_suite.benchmarks.records.runs import RunRecord
from fp8_suite.benchmarks.records.table import read_table, read_texts, studies
from fp8_suite.benchmarks.report.gaps import final_gap
from fp8_suite.benchmarks.report.judge import Judgement
from fp8_suite.benchmarks.report.main import main
from fp8_suite.core.packages import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MEASURES = {"tokens/s": "tokens_per_second", "TFLOP/s": "model_tflops_per_gpu", "peak GB": "peak_memory_gb"}
NUMBER = r"[+-]?[\d,]*\.?\d+"
# Sections whose tables quote studies that the page names elsewhere.
NAMED_ELSEWHERE = {
    ("README.md", "Train"): ["throughput", "h200-models", "h200-four", "h200-eight", "h200-offload", "lora"],
}


class Table(NamedTuple):
    """Table of a page with the recorded studies that its section names."""

    page: str
    section: str
    studies: list[str]
    rows: list[dict[str, str]]


@cache
def runs_of(study: str) -> list[RunRecord]:
    return read_table(study)


@cache
def known_studies() -> set[str]:
    """Return all studies, and the beginnings that name several."""
    return {"/".join(parts[:n]) for study in studies() for parts in [study.split("/")] for n in (1, 2, 3)}


def named_studies(text: str) -> list[str]:
    return sorted(set(re.findall(r"`([\w./-]+)`", text)) & known_studies())


@cache
def tables() -> list[Table]:
    quoted_tables = []
    for page in PAGES:
        for section in re.split(r"^##+ ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            title = section.split("\n")[0]
            quoted = NAMED_ELSEWHERE.get((page.name, title)) or named_studies(section)
            for block in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
                lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
                rows = [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]
                quoted_tables.append(Table(page.name, title, quoted, rows))
    return quoted_tables


def find(page: str, title: str) -> Table:
    return next(table for table in tables() if (table.page, table.section) == (page, title))


def shows(text: str, value: float | None) -> bool:
    """True if the figure that `text` begins with is `value`, to the digits shown."""
    if value is None or not (number := re.match(NUMBER, text)):
        return False
    digits = len(number[0].partition(".")[2])
    return abs(float(number[0].replace(",", "")) - value) <= 0.51 * 10**-digits


def candidates(names: list[str]) -> list[list[RunRecord]]:
    """Return the runs of studies, alone and with their repeats, whose medians a page may show."""
    runs = [run for name in names for run in runs_of(name)]
    repeats: dict[str, list[RunRecord]] = {}
    for run in runs:
        repeats.setdefault(re.sub(r"(?<=-[0-9a-f]{7})-\d$", "", run.name), []).append(run)
    return [*([run] for run in runs), *repeats.values()]


def measured(runs: list[RunRecord], metric: str) -> list[float]:
    """Return what a page may show: the median of the summaries, or of the full steps after the first."""
    values = [run.value(metric) for run in runs]
    logged = [rate for run in runs for _, rate in run.series("perf/tokens_per_second")[1:]]
    full = [rate for rate in logged if rate > 0.9 * max(logged)]  # an epoch may end with a smaller step
    steps = [median(full)] if full and metric == "tokens_per_second" else []
    return [median(values), *steps] if None not in values else []


@pytest.mark.parametrize("name", sorted({name for t in PAGES for name in named_studies(t.read_text())}))
def test_a_study_that_a_page_names_is_shown(name, capsys):
    assert main(["--study", name]) == 0
    assert len(capsys.readouterr().out) > 200


def rated_tables() -> list[Table]:
    return [t for t in tables() if t.studies and re.fullmatch(NUMBER, t.rows[0].get("tokens/s", ""))]


@pytest.mark.parametrize("table", rated_tables(), ids=lambda table: f"{table.page}-{table.section}")
def test_speed_and_memory_in_a_row_are_those_of_one_recorded_run(table):
    groups, size = candidates(table.studies), ""
    for row in table.rows:
        size = next(iter(re.findall(r"\d+B", row.get("model", ""))), size)
        cells = {heading.split(",")[0]: text for heading, text in row.items()}
        figures = {metric: cells[heading] for heading, metric in MEASURES.items() if heading in cells}
        assert any(
            all(any(shows(text, v) for v in measured(runs, metric)) for metric, text in figures.items())
            for runs in groups
            if size in runs[0].value("model_name")
        ), row


def test_factors_between_stacks_are_those_of_the_record():
    rates = {run.name: run.tokens_per_gpu for run in runs_of("same-work")}
    fastest, rows = max(rates.values()), find("results.md", "The same work").rows
    assert len(rows) == len(rates)
    for row in rows:
        (rate,) = (rate for rate in rates.values() if shows(row["tokens/s"], rate))
        assert shows(row["fastest over it"], fastest / rate), row
    same_recipe = rates["suite-fp8"] / rates["transformers-te-delayed-flash4"]
    assert f"it is {same_recipe:.2f}x as fast" in (ROOT / "docs/results.md").read_text(encoding="utf-8")


def test_speed_and_gap_of_the_recipes_are_those_of_the_record():
    recorded = [run for run in runs_of("h200-recipes") if not run.name.startswith("emulated")]
    runs = {(run.value("model_name").split("/")[1], run.precision, run.layers): run for run in recorded}
    for row in find("results.md", "Recipes").rows:
        precision = row["precision"].split(",")[0].lower()
        for model, text in list(row.items())[1:]:
            name = model.replace("Llama ", "Llama-").replace(" ", "-")
            (layers,) = (kind for n, p, kind in runs if (n, p) == (name, precision))
            run, base = runs[name, precision, layers], runs[name, "bf16", layers]
            speed, gap = re.fullmatch(rf"(?:({NUMBER})x, )?({NUMBER}) %", text).groups()
            tails = [record.value("train_loss_tail_mean") for record in (run, base)]
            assert shows(gap, 100 * (tails[0] / tails[1] - 1)), (row, model)
            assert speed is None or shows(speed, run.tokens_per_gpu / base.tokens_per_gpu), (row, model)


def test_scaling_and_memory_of_every_mode_are_those_of_the_record():
    runs = [run for run in runs_of("h200-modes") if "same" not in run.name and "acc" not in run.name]
    for row in find("results.md", "Every mode").rows:
        size, gpus = row["model, GPUs"].split(", ")
        sized = [run for run in runs if size in run.value("model_name")]
        (single,) = (run for run in sized if run.gpus == 1)
        for mode, text in list(row.items())[1:]:
            if text != "-":
                scaling, peak = re.fullmatch(r"(\d+) \((\d+)\)", text).groups()
                assert any(
                    shows(scaling, 100 * run.tokens_per_gpu / single.tokens_per_gpu)
                    and shows(peak, run.value("peak_memory_gb") - run.remarks.get("held_before_gb", 0))
                    for run in sized
                    if run.gpus == int(gpus) and run.mode == mode.strip("`")
                ), (row, mode)


def pairs_of(study: str) -> list[tuple[RunRecord, RunRecord]]:
    """Return every run with the BF16 run of its seed and layers."""
    runs = runs_of(study)
    bases = {(r.config["seed"], r.layers): r for r in runs if r.name.startswith("bf16")}
    return [(r, bases[key]) for r in runs if (key := (r.config["seed"], r.layers)) in bases]


def test_gaps_of_a_thousand_steps_are_those_of_the_record():
    pairs = pairs_of("thousand_steps/te") + pairs_of("thousand_steps/hf")
    for row in find("studies.md", "A thousand steps").rows:
        same_recipe = [pair for pair in pairs if pair[0].precision == row["recipe"].split(",")[0]]
        for seed, column in ((42, "seed 42"), (43, "43"), (44, "44")):
            gaps = [100 * final_gap(*pair) for pair in same_recipe if pair[0].config["seed"] == seed]
            assert not row[column] or any(shows(row[column], gap) for gap in gaps), (row, column)


def test_losses_of_five_thousand_steps_are_those_of_the_record():
    runs = {}
    for run in runs_of("five_thousand_steps"):
        name = run.precision.replace("bf16", "BF16")
        name += ", 6 x 2" if run.config["batch_size"] == 6 else ""
        name += ", FP8 moments" if run.config["moment_dtype"] == "fp8" else ""
        runs[name, str(run.config["seed"])] = run
    means, finals, ends = (table.rows for table in tables() if table.section == "Five thousand steps")
    gaps = {}
    for row in means:
        first, last = (int(step.replace(",", "")) for step in row.pop("steps").split(" to "))
        loss = {
            key: fmean(loss for step, loss in run.series("train/loss") if first <= step <= last)
            for key, run in runs.items()
        }
        gaps = {key: 100 * (mean / loss["BF16", key[1]] - 1) for key, mean in loss.items()}
        assert shows(row.pop("BF16"), fmean(loss["BF16", seed] for seed in ("42", "43", "44")))
        for recipe, text in row.items():
            seeds = tuple(gap for (name, _), gap in sorted(gaps.items()) if name == recipe)
            figures = seeds if recipe == "BF16, 6 x 2" else (fmean(seeds), *Judgement(seeds).bounds)
            shown = re.findall(NUMBER, text)
            assert all(itertools.starmap(shows, zip(shown, figures, strict=True))), (row, recipe)
    for row in finals:
        recipe = row.pop("recipe")
        shown = {name.removeprefix("seed "): gap for name, gap in row.items() if gap}
        assert shown and all(shows(gap, gaps[recipe, seed]) for seed, gap in shown.items()), row
    for row in ends:
        run = runs[row["trained in"], row["seed"]]
        losses = run.value("eval_loss"), run.value("export_loss_bf16"), run.value("export_loss_fp8")
        if run.summary is None:  # it ended before its exports were evaluated
            assert shows(row["evaluated as trained"], losses[0]) and not row["FP8 export"]
            continue
        assert all(map(shows, (row["evaluated as trained"], row["BF16 export"], row["FP8 export"]), losses))
        assert shows(row["in BF16"], run.value("eval_loss_bf16") or losses[0])
    assert len(ends) == len(runs)


def test_losses_from_fp8_checkpoints_are_those_of_the_record():
    runs = {run.name: run for run in runs_of("fp8-starts")}
    small, large = (table.rows for table in tables() if table.section == "Fine-tuning FP8 checkpoints")
    for rows, ends in ((small, ("-seed42", "-seed43", "-seed44")), (large, ("",))):
        for row in rows:
            start = row["weights"].replace("FP8, ", "").replace("BF16", "bf16-weights")
            named = [runs[f"{start}-{row['trained in'].lower()}{end}"] for end in ends]
            curves = [dict(run.series("eval/loss")) for run in named]
            for steps in (20, 40, 100):
                assert shows(row[f"{steps} steps"], fmean(curve[steps] for curve in curves)), row
            assert shows(row["FP8 export"], fmean(run.value("export_loss_fp8") for run in named))


def test_losses_of_small_updates_are_those_of_the_record():
    runs = {run.name: run for run in runs_of("small-updates/1b")}
    for row in find("studies.md", "Small updates of BF16 weights").rows:
        rate, precision, *masters = row["training"].split(", ")
        run = runs["-".join([*masters, precision.lower(), f"lr{rate}", "seed42"])]
        for steps in (20, 60, 100):
            assert shows(row[f"{steps} steps"], dict(run.series("eval/loss"))[steps]), row
        assert shows(row["BF16 export"], run.value("export_loss_bf16")), row
        assert shows(row["FP8 export"], run.value("export_loss_fp8")), row


def test_the_example_of_a_comparison_is_that_of_the_record():
    runs = {run.name: run for run in runs_of("h200-compare/1b")}
    for row in find("compare.md", "An example").rows:
        run, base = runs[row["variant"]], runs["bf16_hf" if row["variant"] == "tensorwise" else "bf16"]
        evaluations = run.value("eval_loss") / base.value("eval_loss")
        assert shows(row["gap"], 100 * final_gap(run, base))
        assert shows(row["eval gap"], 100 * (evaluations - 1))
        assert shows(row["speed"], run.tokens_per_gpu / base.tokens_per_gpu)
        assert shows(row["peak GB"], run.value("peak_memory_gb"))


def test_the_cost_of_saves_is_that_of_the_record():
    saves = []  # each kind of background save, and the save that training waits for
    for text in read_texts("saves").values():
        lines = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line[:1] == "|"]
        rows = {line[1]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}
        saves += [(rows[kind], rows.get("sync")) for kind in ("async", "torch") if kind in rows]
    table = find("results.md", "Saves and starts")
    assert len(table.rows) == len(saves)
    for row in table.rows:
        (background, waiting) = next(
            pair for pair in saves if shows(row["s added"], float(pair[0]["s added"]))
        )
        assert row["steps beside it"] == background["steps beside a save"]
        for shown, column in (("GB", "GB"), ("s to write", "s to publish")):
            assert shows(row[shown], float(background[column]))
        shown = row["s added, waiting"]
        assert shown == "-" or shows(shown, float(waiting["s added"]))


def test_goodput_and_starts_are_those_of_the_record():
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8").split("## Saves and starts")[1]
    (run,) = runs_of("goodput")
    spent, goodput = run.value("wall_seconds_by_kind"), run.value("goodput")
    for share in (goodput, run.series("perf/goodput")[-1][1]):
        assert f"{share:.1%}".replace("%", " %") in text
    for kind, value in re.findall(rf"the\s+(start|evaluation)\s+({NUMBER})\s+s", text):
        assert shows(value, spent[kind])
    starts = {run.name: run.environment["seconds_to_first_step"] for run in runs_of("starts")}
    for name in ("8b-fresh", "8b-warm", "8b-warm2", "8b-lost", "8b-lost-alone", "32b"):
        assert f"{starts[name]:.1f}" in text


def test_starts_and_exports_in_fp8_are_those_of_the_record():
    text = (ROOT / "docs/fp8_checkpoints.md").read_text(encoding="utf-8")
    runs = {run.name: run for run in runs_of("fp8-checkpoints")}
    loading, starting = re.findall(rf"({NUMBER})(?: s from FP8 files and in | and )({NUMBER}) s", text)[:2]
    for index, name in enumerate(("8b-from-fp8", "8b-from-bf16")):
        environment = runs[name].environment
        assert shows(loading[index], environment["seconds_by_phase"]["building the model"])
        assert shows(starting[index], environment["seconds_to_first_step"])
    seconds = re.search(rf"together take ({NUMBER}) s", text)[1]
    assert shows(seconds, runs["8b-export"].value("wall_seconds_by_kind")["export"])


def test_emulated_losses_are_as_far_from_te_s_as_the_page_says():
    runs = {run.name: dict(run.series("train/loss")) for run in runs_of("h200-recipes")}
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    for recipe in ("delayed", "current", "block"):
        emulated, native = runs[f"emulated-{recipe}"], runs[f"Llama-3.2-1B-{recipe}"]
        gaps = []
        for step in range(2, 101, 2):  # TE's losses are stored as means of two
            mean = (emulated[step - 1] + emulated[step]) / 2 if 1 in emulated else emulated[step]
            gaps.append(abs(mean / native[step] - 1))
        assert shows(re.search(rf"({NUMBER}) %\s+\({recipe}\)", text)[1], 100 * fmean(gaps)), recipe


def test_the_time_of_long_sequences_is_that_of_the_record():
    texts = read_texts("h200-profile")
    for row in find("studies.md", "Where long sequences spend their time").rows:
        length = int(row["tokens per sequence"].replace(",", ""))
        (text,) = (text for name, text in texts.items() if re.search(rf"8B-{length}-.*(fast|fp8-head)", name))
        kinds = re.findall(rf"({NUMBER}) ms +\d+ launches  (.+)", text)
        tokens = {8192: 8, 32768: 2, 131072: 1}[length] * length
        spent = {kind: float(ms) * 1e3 / tokens for ms, kind in kinds}
        spent["copies and sums"] -= sum(
            float(ms) * 1e3 / tokens for ms in re.findall(rf"({NUMBER}) ms .+Memcpy", text)
        )
        del spent["idle"]
        attention, gemms = spent.pop("attention"), spent.pop("GEMM")
        assert shows(row["attention"], attention) and shows(row["GEMMs"], gemms), row
        assert shows(row["all else"], sum(spent.values())), row
        flops = 6 * 32 * 4096 * length  # causal half of the 8B's 32 layers of width 4,096, per token
        assert shows(row["TFLOP/s of attention"], flops / attention / 1e6), row
