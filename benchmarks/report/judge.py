"""Test of non-inferiority over seeds: is a run's loss at most a limit above its baseline's?

A pair is a run and its baseline with the same seed. The mean of the pairs' relative gaps has one-sided 95 %
bounds by the paired t test. One pair shows nothing about the spread between seeds and decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean, stdev
from typing import Any, NamedTuple

from fp8_suite.benchmarks.records.runs import RunRecord
from fp8_suite.benchmarks.report import gaps
from fp8_suite.benchmarks.report.tables import Columns, Table, labels, make_table
from fp8_suite.core.errors import counted

CONFIDENCE = 0.95
NORMAL_QUANTILE = 1.645  # below which a normal variable lies with that probability
MAX_LOSS_GAP = 0.5  # percent
WINDOWS = 10  # of a run, in the table of gaps over time; the last is that of the verdict
MAX_SEEDS = 100  # a verdict that needs more seeds than this is out of reach
# Standard deviation of a recipe's gaps over seeds, in percent, pooled over the recipes with several seeds in
# the studies thousand_steps/te and fp8-moments/1b.
RECORDED_SPREAD = 0.32
# Losses of the final weights -> value in summary.json: as trained, without FP8, and of the exported files.
FINAL_LOSSES = {"evaluation": "eval_loss", "evaluation in BF16": "eval_loss_bf16"}
FINAL_LOSSES |= {"export": "export_loss_bf16", "FP8 export": "export_loss_fp8"}
Pair = tuple[RunRecord, RunRecord]  # (run, its baseline)


@lru_cache
def t_quantile(freedom: int) -> float:
    """Return the t below which Student's t lies with probability CONFIDENCE, by integrating its density."""
    import numpy as np  # slow to import

    t, step = np.linspace(0, 7, 70_001, retstep=True)  # 6.31 for one degree of freedom
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    density = scale * (1 + t**2 / freedom) ** (-(freedom + 1) / 2)
    trapezoids = (density[1:] + density[:-1]) / 2 * step
    return float(np.interp(CONFIDENCE, 0.5 + np.cumsum(trapezoids), t[1:]))


@dataclass(frozen=True)
class Judgement:
    """Verdict on the gaps of pairs of runs, in percent."""

    gaps: tuple[float, ...]
    limit: float = MAX_LOSS_GAP
    reason: str | None = None  # reason of a FAIL that needs no test, such as a loss that is not finite
    sampling: float = 0.0  # standard error of a gap by the choice of its samples, which all seeds share

    @property
    def mean(self) -> float | None:
        return fmean(self.gaps) if self.gaps else None

    @property
    def bounds(self) -> tuple[float, float] | None:
        """One-sided 95 % bounds of the mean gap; None for fewer than two pairs."""
        if len(self.gaps) < 2:
            return None
        margin = self._margin(len(self.gaps))
        return self.mean - margin, self.mean + margin

    def _margin(self, pairs: int) -> float:
        spread = t_quantile(pairs - 1) * stdev(self.gaps) / math.sqrt(pairs)
        return math.hypot(spread, NORMAL_QUANTILE * self.sampling)

    @property
    def verdict(self) -> str:
        if self.reason:
            return "FAIL"
        if self.bounds and self.bounds[1] < self.limit:
            return "PASS"
        return "FAIL" if self.bounds and self.bounds[0] > self.limit else "INCONCLUSIVE"

    @property
    def further_seeds(self) -> int | None:
        """Number of further seeds that decide if mean and spread stay as they are; None if out of reach."""
        if len(self.gaps) < 2 or self.verdict != "INCONCLUSIVE":
            return None
        enough = (
            n for n in range(len(self.gaps), MAX_SEEDS) if self._margin(n) < abs(self.limit - self.mean)
        )
        return next((n - len(self.gaps) for n in enough), None)

    def describe(self) -> str:
        """Return the reason of the verdict in words."""
        if self.reason:
            return self.reason
        if not self.gaps:
            return "no pair of runs has finite losses"
        if not self.bounds:
            spread = f"recorded loss gaps vary by {RECORDED_SPREAD:g} % (standard deviation) between seeds"
            return f"gap {self.mean:+.2f} % with one seed, which does not decide: {spread}"
        low, high = self.bounds
        text = f"mean gap {self.mean:+.2f} % over {len(self.gaps)} seeds"
        if self.verdict == "PASS":
            return f"{text}, below {high:+.2f} % with 95 % confidence; limit {self.limit:g} %"
        if self.verdict == "FAIL":
            return f"{text}, above {low:+.2f} % with 95 % confidence; limit {self.limit:g} %"
        more = self.further_seeds
        decide = f"about {counted(more, 'further seed')}" if more else f"not even {MAX_SEEDS} seeds"
        return f"{text}, bounds {low:+.2f} and {high:+.2f} %, limit {self.limit:g} %: {decide} would decide"

    def to_dict(self) -> dict[str, Any]:
        low, high = self.bounds or (None, None)
        return {
            "verdict": self.verdict,
            "gaps_percent": list(self.gaps),
            "mean_gap_percent": self.mean,
            "lower_bound_percent": low,
            "upper_bound_percent": high,
            "further_seeds": self.further_seeds,
            "reason": self.describe(),
        }


def judge_training(pairs: Sequence[Pair], limit: float) -> Judgement:
    """Judge the mean training losses over the last 10 % of steps."""
    if any(gaps.ends_finite(baseline) and not gaps.ends_finite(run) for run, baseline in pairs):
        return Judgement((), limit, "its last training loss is not finite")
    return Judgement(_percent(gaps.final_gap(*pair) for pair in pairs), limit)


def judge_final_losses(pairs: Sequence[Pair], limit: float) -> dict[str, Judgement]:
    """Judge the losses of the final weights on the evaluation data, where runs and baselines have them."""
    judged = {}
    for name, key in FINAL_LOSSES.items():
        fallback = "eval_loss" if key == "eval_loss_bf16" else key  # a BF16 baseline has no other
        losses = [(run.value(key), base.value(key) or base.value(fallback)) for run, base in pairs]
        losses = [(loss, reference) for loss, reference in losses if loss is not None and reference]
        percent = _percent(loss / reference - 1 for loss, reference in losses if math.isfinite(reference))
        judgement = Judgement(percent, limit)
        if any(math.isfinite(reference) and not math.isfinite(loss) for loss, reference in losses):
            judgement = Judgement((), limit, f"its {name} loss is not finite")
        judged |= {name: judgement} if losses else {}
    return judged


def judge_evaluated(pairs: Sequence[Pair], limit: float) -> dict[str, Judgement]:
    """Judge the results of benchmarks.evaluate by measure and export, where the data are the same.

    An export is compared with its counterpart, else with the baseline's BF16 `export`. The gap is how much
    worse it is: the drop of an accuracy in percentage points, else the relative difference in percent.
    """
    gaps: dict[str, list[float]] = {}
    errors: dict[str, list[float]] = {}
    for run, baseline in pairs:
        references = {(r.export, r.measure, r.data): r for r in baseline.evaluation}
        for result in run.evaluation:
            keys = [(export, result.measure, result.data) for export in (result.export, "export")]
            reference = next((references[key] for key in keys if key in references), None)
            if reference is None:
                continue
            is_accuracy = result.higher_is_better and 0 <= reference.value <= 1
            unit = (-100 if result.higher_is_better else 100) / (1 if is_accuracy else reference.value)
            name = f"{result.measure} of {result.export}"
            gaps.setdefault(name, []).append(unit * (result.value - reference.value))
            _, error = result.difference(reference) or (0, 0)
            errors.setdefault(name, []).append(abs(unit) * error)
    return {
        name: Judgement(tuple(values), limit, sampling=fmean(errors[name])) for name, values in gaps.items()
    }


def _percent(fractions: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(100 * fraction for fraction in fractions if fraction is not None)


@dataclass(frozen=True)
class Result:
    """A run and its repetitions with other seeds, each paired with its baseline, the first seed first."""

    name: str
    baseline_name: str
    pairs: list[Pair]
    judgements: dict[str, Judgement]  # by loss or measure: "training", FINAL_LOSSES, benchmarks.evaluate's

    @property
    def run(self) -> RunRecord:
        return self.pairs[0][0]

    @property
    def baseline(self) -> RunRecord:
        return self.pairs[0][1]

    @property
    def training(self) -> Judgement:
        return self.judgements["training"]

    @property
    def speedup(self) -> float | None:
        rates = self.run.tokens_per_gpu, self.baseline.tokens_per_gpu
        return rates[0] / rates[1] if all(rates) else None


def judge_pairs(pairs: list[Pair], limit: float, name: str, baseline_name: str) -> Result:
    judgements = {"training": judge_training(pairs, limit)}
    judgements |= judge_final_losses(pairs, limit) | judge_evaluated(pairs, limit)
    return Result(name, baseline_name, pairs, judgements)


@dataclass(frozen=True)
class Verdict:
    """Results of all runs or variants but the reference, and why some have none."""

    reference: RunRecord
    results: list[Result]
    answer: str  # in one line; may be empty
    notes: list[str]
    left_out: dict[str, str] = field(default_factory=dict)  # name -> reason


def judge_runs(runs: list[RunRecord], reference: RunRecord) -> Verdict:
    """Judge every comparable run over all seeds that it shares with the reference.

    Without such a seed, a run is compared with the reference itself. The answer is that of the runs with
    several seeds.
    """
    names, baselines = labels(runs), gaps.seed_runs(runs, reference)
    groups: dict[RunRecord, dict[int, Pair]] = {}  # first run of each setting -> its pairs by seed
    left_out: dict[str, str] = {}
    for run in (run for run in runs if run is not reference):
        seed = run.setting("seed")
        baseline = baselines.get(seed, reference)
        if reason := gaps.why_not_comparable(run, baseline):
            left_out[names[run]] = reason
        elif baselines.get(seed, run) is not run or not gaps.repeats(run, reference):  # no baseline itself
            first = next((f for f in groups if seed not in groups[f] and gaps.repeats(run, f)), run)
            groups.setdefault(first, {})[seed] = run, baseline
    results = []
    for first, by_seed in groups.items():
        pairs = [pair for seed, pair in by_seed.items() if seed in baselines]
        pairs = pairs or [by_seed[first.setting("seed")]]
        run, baseline = pairs[0]
        results.append(judge_pairs(pairs, MAX_LOSS_GAP, names[run], names[baseline]))
    notes = [f"{line.result.name}, {line.loss}: {line.judgement.describe()}" for line in lines_of(results)]
    return Verdict(reference, results, answer(with_seeds(results)), notes, left_out)


def with_seeds(results: list[Result]) -> list[Result]:
    """Return the results of several seeds."""
    return [result for result in results if len(result.pairs) > 1]


class Line(NamedTuple):
    """Verdict on one loss or measure of one result."""

    result: Result
    loss: str
    judgement: Judgement
    settings: str | None  # differing settings other than precision


LINES: Columns = {
    "variant": (lambda line: line.result.name, "{}"),
    "baseline": (lambda line: line.result.baseline_name, "{}"),
    "loss": (lambda line: line.loss, "{}"),
    "verdict": (lambda line: line.judgement.verdict, "{}"),
    "mean gap": (lambda line: line.judgement.mean, "{:+.2f} %"),
    "95 % bounds": (lambda line: line.judgement.bounds, "{0[0]:+.2f} to {0[1]:+.2f} %"),
    "seeds": (lambda line: len(line.judgement.gaps), "{}"),
    "speed": (lambda line: line.result.speedup, "{:.2f}x"),
    "differing settings other than precision": (lambda line: line.settings, "{}"),
}


def lines_of(results: Iterable[Result]) -> list[Line]:
    return [
        Line(result, loss, judgement, settings)
        for result in results
        for settings in [", ".join(gaps.other_settings(result.run, result.baseline)) or None]
        for loss, judgement in result.judgements.items()
    ]


def verdict_table(results: Iterable[Result]) -> Table:
    """Return a table with a row for each loss of each result."""
    return make_table(LINES, lines_of(results))


def gaps_over_time(results: Iterable[Result]) -> Table:
    """Return mean gaps with bounds: a row for each of WINDOWS parts of the run, a column per result."""
    columns: Columns = {"steps": (lambda window: "{:,}-{:,}".format(*window), "{}")}
    windows: set[tuple[int, int]] = set()
    for result in results:
        curves = [gaps.window_gaps(run, baseline, WINDOWS) for run, baseline in result.pairs]
        windows.update(*curves)
        columns[result.name] = (lambda window, curves=curves: _gap_in(window, curves), "{}")
    return make_table(columns, sorted(windows))


def _gap_in(window: tuple[int, int], curves: list[dict[tuple[int, int], float]]) -> str | None:
    judgement = Judgement(_percent(curve.get(window) for curve in curves))
    if not judgement.gaps:
        return None
    bounds = judgement.bounds and " ({:+.2f} to {:+.2f})".format(*judgement.bounds)
    return f"{judgement.mean:+.2f} %{bounds or ''}"


def answer(results: list[Result]) -> str:
    """Return the verdicts on the training losses in words, in one line; "" without results."""
    parts = []
    if passed := [result.name for result in results if result.training.verdict == "PASS"]:
        limit = f"{results[0].training.limit:g} % above its baseline's, with 95 % confidence"
        parts.append(f"PASS for {', '.join(passed)}: training loss at most {limit}")
    for result in results:
        if (verdict := result.training.verdict) != "PASS":
            parts.append(f"{verdict} for {result.name}: {result.training.describe()}")
    return "; ".join(parts) + "." if parts else ""
