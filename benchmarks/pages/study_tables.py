"""The tables of docs/studies: which BF16 run each run is held against, and a row or cell for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.pages.performance_page import state
from benchmarks.records.runs import RunRecord
from benchmarks.records.variants import VARIANTS
from benchmarks.report import gaps, verdict
from benchmarks.report.markdown import table

TAIL_STEPS = 50  # batch_one averages the losses of so many steps
DRIFT = 5  # parts of a run whose gaps thousand_steps lists
# What a run shares with the BF16 run that it is held against, beside what `verdict.what_differs` looks at.
BATCH = ("batch_size", "gradient_accumulation_steps")
SAME = ("use_te", "master_weights", "moment_dtype", "gradient_checkpointing", *BATCH)
# What a recipe may be tried with that BF16 beside it is not, and how a row says so.
OWN = {
    "moment_dtype": "{} moments",
    "gradient_accumulation_steps": "{} micro-batches",
    "grad_reduce_dtype": "gradients summed in {}",
}


def is_bf16(run: RunRecord) -> bool:
    return run.config["mixed_precision"] == "bf16"


def bf16_like(run: RunRecord, runs: Iterable[RunRecord], same: tuple[str, ...] = SAME) -> list[RunRecord]:
    """The BF16 runs of the same GPUs and settings: layers, weights and split of the batch."""
    where = (run.gpus, run.mode)
    return [
        other
        for other in runs
        if is_bf16(other)
        and (other.gpus, other.mode) == where
        and all(other.setting(name) == run.setting(name) for name in same)
    ]


def baseline(run: RunRecord, runs: Iterable[RunRecord], same: tuple[str, ...] = SAME) -> RunRecord | None:
    """The BF16 run that differs from `run` in its precision alone; None without one."""
    return next((o for o in bf16_like(run, runs, same) if verdict.what_differs(o, run) is None), None)


def nearest_baseline(run: RunRecord, runs: Iterable[RunRecord]) -> RunRecord | None:
    """`baseline`, or else a BF16 run of the same layers and experiment whose `OWN` settings are others."""
    return baseline(run, runs) or baseline(run, runs, ("use_te", "master_weights"))


def own_settings(run: RunRecord, reference: RunRecord) -> list[str]:
    values = {name: (run.config.get(name), reference.config.get(name)) for name in OWN}
    return [OWN[name].format(str(own).upper()) for name, (own, other) in values.items() if own != other]


def other_seeds(reference: RunRecord, runs: Iterable[RunRecord]) -> list[RunRecord]:
    """The BF16 runs that end finite and differ from the BF16 run `reference` in their seed alone."""
    return [
        other
        for other in bf16_like(reference, runs)
        if other.config["seed"] != reference.config["seed"]
        and gaps.ends_finite(other)
        and verdict.what_differs(reference, other, other_seed=True) is None
    ]


def judged(run: RunRecord, found: RunRecord | None, pairs: Sequence[verdict.Pair] = ()) -> verdict.Row:
    """A run beside its baseline, by `verdict.judge`; BF16, and what has none, stands alone."""
    against = {"against": found.name if found else None, "pairs": pairs}
    return verdict.judge(run.name, run, found, max_loss_gap=verdict.MAX_LOSS_GAP, price=None, **against)


def recipe(run: RunRecord) -> str:
    """What `VARIANTS` calls the precision that the run had."""
    if is_bf16(run):
        return "bf16" if run.config["use_te"] else "bf16_hf"
    return run.value("recipe") or run.config["fp8_scenario"]


def precision(run: RunRecord) -> str:
    parts = [
        "BF16" if is_bf16(run) else f"FP8 {recipe(run)}",
        f"{'TE' if run.config['use_te'] else 'HF'} layers",
    ]
    parts += ["FP8 all-gather"] if run.config.get("fp8_all_gather") else []
    parts += ["FP8 LM head"] if run.config.get("fp8_lm_head") else []
    parts += ["FP32 scales"] if run.config.get("fp8_fp32_scales") else []
    parts += ["fast accumulation"] if run.config.get("fp8_fast_accumulation") else []
    return ", ".join(parts) + (" (emulated)" if run.emulated else "")


def order(run: RunRecord) -> tuple[int, str]:
    """Where a row of this precision stands: TE layers, then others, BF16 before FP8."""
    names = [*(name for name in VARIANTS if VARIANTS[name]["use_te"]), *VARIANTS]
    return names.index(recipe(run)) if recipe(run) in names else len(names), precision(run)


def by(runs: Iterable[RunRecord], key: Callable[[RunRecord], Any]) -> dict[Any, list[RunRecord]]:
    """Runs by `key`, in the order of the keys."""
    groups: dict[Any, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return dict(sorted(groups.items()))


class Experiment(NamedTuple):
    """What the rows of a table share."""

    model: str
    length: int
    data: str
    machine: str
    learning_rate: float
    steps: int

    @classmethod
    def of(cls, run: RunRecord) -> Experiment:
        machine = run.environment.get("gpu_name") or "CPU"
        data = run.config["dataset_name"].rstrip("/").rsplit("/", 1)[-1]
        steps = run.config["max_steps"] or run.value("steps")
        model, length, rate = (run.config[n] for n in ("model_name", "max_seq_length", "learning_rate"))
        return cls(model, length, data, machine, rate, steps)

    def heading(self) -> str:
        sizes = f"{self.length:,} tokens, {self.steps:,} steps"
        return f"### {self.model}, {sizes}, learning rate {self.learning_rate:g}, {self.data}, {self.machine}"


def formatted(value: float | None, format_: str) -> str:
    return "-" if value is None else format_.format(value)


def verdict_cells(row: verdict.Row, *headings: str) -> list[str]:
    """Cells of columns that the verdict of a comparison has, too."""
    columns = [verdict.COLUMNS[heading] for heading in headings]
    return [formatted(row.values.get(name), format_) for name, format_ in columns]


def last_losses(run: RunRecord) -> float | None:
    """Mean of the training losses logged in the last `TAIL_STEPS` steps; None without any."""
    series = run.series("train/loss")
    return mean_loss(run, series[-1][0] - TAIL_STEPS, series[-1][0]) if series else None


def mean_loss(run: RunRecord, after: int, last: int) -> float | None:
    """Mean of the training losses logged past step `after` up to `last`; None without any."""
    losses = [loss for step, loss in run.series("train/loss") if after < step <= last]
    return fmean(losses) if losses else None


def split(run: RunRecord) -> tuple[int, int, int]:
    """Sequences of a step, GPUs (1 for a CPU), and the micro-batches of each."""
    return run.global_batch, max(1, run.gpus), run.config["gradient_accumulation_steps"]


def column(batch: int, gpus: int, micro_batches: int) -> str:
    how = [f"{gpus} GPUs"] * (gpus > 1) + [f"{micro_batches} micro-batches"] * (micro_batches > 1)
    return f"batch {batch}" + (f" ({', '.join(how)})" if how else "")


def batch_one(runs: list[RunRecord]) -> list[str]:
    """For each experiment a table of precision and weights against global batch."""

    def cell(run: RunRecord) -> str:
        if run.summary is None:
            return f"stopped at step {run.value('steps')}"
        mean, reference = last_losses(run), None if is_bf16(run) else baseline(run, runs)
        gap = verdict.percent_above(mean, last_losses(reference)) if reference else None
        return formatted(mean, "{:.4f}") + ("" if gap is None else f" ({gap:+.2f} %)")

    parts = []
    for experiment, group in by(runs, Experiment.of).items():
        columns = by(group, split)
        rows = by(group, lambda run: (state(run.config), *order(run)))
        lines = [
            [precision(row[0]), state(row[0].config)]
            + [" / ".join(cell(run) for run in row if split(run) == key) or "-" for key in columns]
            for row in rows.values()
        ]
        headings = ["precision", "weights", *(column(*key) for key in columns)]
        parts += [experiment.heading(), table(headings, lines)]
    return parts


def fsdp_finetuning(runs: list[RunRecord]) -> list[str]:
    """For each experiment a table of precision against GPUs and batch, then one with a row a run."""
    losses = ("train loss, mean of last 10 %", "gap", "eval loss", "eval gap", "perplexity", "token accuracy")
    rates = ("speed", "MFU of BF16 peak", "MFU of FP8 peak", "peak GB", "GPU-hours")
    headings = ["precision", "GPUs", "mode", "batch", "final train loss", *losses, "tokens/s per GPU", *rates]
    headings.append("node-hours")

    def against_bf16(run: RunRecord) -> verdict.Row:
        return judged(run, None if is_bf16(run) else baseline(run, runs))

    def speed_and_gap(run: RunRecord) -> str:
        if is_bf16(run):
            return formatted(run.tokens_per_gpu, "{:,.0f}")
        return "{}, {}".format(*verdict_cells(against_bf16(run), "speed", "gap"))

    def cells(run: RunRecord) -> list[str]:
        row = against_bf16(run)
        return [
            *(precision(run), str(run.gpus or "-"), f"`{run.mode}`"),
            " x ".join(str(run.config[name]) for name in BATCH),
            formatted(run.value("train_loss"), "{:.4f}"),
            *verdict_cells(row, *losses),
            formatted(run.tokens_per_gpu, "{:,.0f}"),
            *verdict_cells(row, *rates),
            formatted(run.value("node_hours"), "{:.3f}"),
        ]

    def place(run: RunRecord) -> tuple[int, int, int]:
        return run.gpus, *(run.config[name] for name in BATCH)

    parts = []
    for experiment, group in by(sorted(runs, key=order), Experiment.of).items():
        places = by(group, place)
        lines = [
            [precision(found[0])]
            + [" / ".join(speed_and_gap(run) for run in found if place(run) == key) or "-" for key in places]
            for found in by(group, order).values()
        ]
        columns = [f"{gpus} GPU{'s' * (gpus > 1)}, {size} x {steps}" for gpus, size, steps in places]
        parts += [
            experiment.heading(),
            "BF16: tokens/s per GPU. FP8: speed against BF16 of the same layers, gap of the training loss.",
            table(["precision", *columns], lines),
            "Every run:",
            table(headings, [cells(run) for found in places.values() for run in found]),
        ]
    return parts


def thousand_steps(runs: list[RunRecord]) -> list[str]:
    """For each experiment a table with a row a recipe, how its gap went, its gaps by seed, and BF16's seeds.

    Without speeds: what is asked is the loss, and runs may share a GPU.
    """
    tail, others = ("train loss, mean of last 10 %", "gap"), ("eval loss", "eval gap", "peak GB")
    headings = ["precision", "verdict", *tail, "BF16's noise", *others]

    def repeats(run: RunRecord, group: list[RunRecord]) -> bool:
        """Whether it is there again with another seed: BF16 for the noise, a recipe for its gaps by seed."""
        others = other_seeds(run, runs) if is_bf16(run) else (o for o in group if name(o) == name(run))
        return any(other.config["seed"] < run.config["seed"] for other in others)

    def against(run: RunRecord) -> RunRecord | None:
        return run if is_bf16(run) else nearest_baseline(run, runs)

    def name(run: RunRecord) -> str:
        reference = against(run)
        return ", ".join([precision(run), *(own_settings(run, reference) if reference else [])])

    def cells(run: RunRecord) -> list[str]:
        reference = against(run)
        row = judged(run, None if is_bf16(run) else reference)
        band = verdict.noise_band(reference, other_seeds(reference, runs)) if reference else None
        noise = "-" if band is None else f"{band[0]:+.2f} % to {band[1]:+.2f} %"
        status = row.status if reference else "-"
        return [name(run), status, *verdict_cells(row, *tail), noise, *verdict_cells(row, *others)]

    parts = []
    for (experiment, batch), group in by(runs, lambda run: (Experiment.of(run), run.global_batch)).items():
        rows = sorted((run for run in group if not repeats(run, group)), key=order)
        passes = next(filter(None, map(verdict.passes, rows)), None)
        how = f"{batch} sequences a step" + (f", {passes:.1f} times over the data" if passes else "")
        parts += [f"{experiment.heading()}, {how}", table(headings, [cells(run) for run in rows])]
        if judged_rows := [run for run in rows if not is_bf16(run) and against(run)]:
            bounds = [round(experiment.steps * part / DRIFT) for part in range(DRIFT + 1)]
            steps = [f"{first + 1:,} to {last:,}" for first, last in pairwise(bounds)]
            lines = [[name(run), *drift(run, against(run), bounds)] for run in judged_rows]
            parts += ["Gap of the training loss, mean over steps:", table(["precision", *steps], lines)]
        seeded = {name(run): [o for o in group if name(o) == name(run) and against(o)] for run in judged_rows}
        if seeded := {recipe: found for recipe, found in seeded.items() if len(found) > 1}:
            parts += ["Gaps by seed, of the training loss and of the evaluation:", by_seed(seeded, runs)]
        for run in rows:
            if is_bf16(run) and (seeds := other_seeds(run, runs)):
                numbers = ", ".join(str(other.config["seed"]) for other in (run, *seeds))
                parts.append(f"Seeds of {precision(run)}: {numbers}.")
    return parts


def by_seed(seeded: dict[str, list[RunRecord]], runs: list[RunRecord]) -> str:
    """A row for each recipe, a column for each seed: the gap to BF16 of that seed, and the mean of them."""
    seeds = sorted({run.config["seed"] for found in seeded.values() for run in found})
    lines = []
    for recipe_name, found in seeded.items():
        pairs = {run.config["seed"]: (run, nearest_baseline(run, runs)) for run in found}
        first, *others = pairs.values()
        rows = [judged(*pairs[seed]) if seed in pairs else None for seed in seeds]
        cells = [
            " / ".join(verdict_cells(row, "gap", "eval gap")) if row else "-"
            for row in (*rows, judged(*first, others))
        ]
        lines.append([recipe_name, *cells])
    return table(["precision", *(f"seed {seed}" for seed in seeds), "mean"], lines)


def drift(run: RunRecord, reference: RunRecord, bounds: list[int]) -> list[str]:
    """How far the mean training loss lies above the reference's between each two neighbours of `bounds`."""
    parts = list(pairwise(bounds))
    gaps = [verdict.percent_above(mean_loss(run, *part), mean_loss(reference, *part)) for part in parts]
    return [formatted(gap, "{:+.2f} %") for gap in gaps]


Against = Callable[[RunRecord, Iterable[RunRecord]], RunRecord | None]


def notes(runs: list[RunRecord], against: Against) -> list[str]:
    """What a reader must know of these runs: which did not finish, and which nothing is held against."""
    found = []
    if unfinished := [f"{run.name} (step {run.value('steps')})" for run in runs if run.summary is None]:
        found.append(f"Not finished: {', '.join(unfinished)}.")
    alone = [r.name for r in runs if r.summary is not None and not is_bf16(r) and not against(r, runs)]
    if alone:
        alike = "layers, weights, batch, data, steps and seed"
        found.append(f"Without a BF16 run of the same {alike}: {', '.join(alone)}.")
    return found
