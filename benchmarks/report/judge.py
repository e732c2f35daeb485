"""Test of non-inferiority over seeds: is a run's loss at most a limit above its baseline's?

A pair is a run and its baseline with the same seed. The mean of the pairs' relative gaps has one-sided 95 %
bounds by the paired t test. One pair shows nothing about the spread between seeds and decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import fmean, stdev
from typing import Any, NamedTuple

from fp8_suite.benchmarks.records.runs import RunRecord
from fp8_suite.benchmarks.report import gaps
from fp8_suite.benchmarks.report.tables import Columns, Table, make_table
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
            return (
                f"gap {self.mean:+.2f} % with one seed, which does not decide: recorded loss gaps vary by "
                f"{RECORDED_SPREAD:g} % (standard deviation) between seeds"
            )
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

    pairs: list[Pair]
    training: Judgement
    final: dict[str, Judgement]  # by name in FINAL_LOSSES
    evaluated: dict[str, Judgement]  # by measure and export, from benchmarks.evaluate

    @property
    def judgements(self) -> dict[str, Judgement]:
        """Judgements by name of the loss or measure."""
        return {"training": self.training} | self.final | self.evaluated

    @property
    def run(self) -> RunRecord:
        return self.pairs[0][0]

    @property
    def baseline(self) -> RunRecord:
        return self.pairs[0][1]

    @property
    def speedup(self) -> float | None:
        rates = self.run.tokens_per_gpu, self.baseline.tokens_per_gpu
        return rates[0] / rates[1] if all(rates) else None


def judge_pairs(pairs: list[Pair], limit: float) -> Result:
    judges = judge_training, judge_final_losses, judge_evaluated
    return Result(pairs, *(judge(pairs, limit) for judge in judges))


def judge_all(losses: gaps.Comparison) -> list[Result]:
    """Return the result of every comparable run over all seeds that it shares with its baseline."""
    results: list[Result] = []
    for run, baseline in losses.pairs:
        if any(gaps.repeats(run, first) for first in (losses.reference, *(result.run for result in results))):
            continue
        by_seed: dict[int, Pair] = {}
        for record, against in losses.pairs:
            seed, same = record.setting("seed"), record is run or gaps.repeats(record, run)
            if same and seed == against.setting("seed"):
                by_seed.setdefault(seed, (record, against))
        results.append(judge_pairs(list(by_seed.values()) or [(run, baseline)], MAX_LOSS_GAP))
    return results


class Line(NamedTuple):
    """Verdict on one loss of one variant."""

    variant: str
    baseline: str
    loss: str  # training or evaluation
    judgement: Judgement
    speedup: float | None
    settings: str | None  # differing settings other than precision


LINES: Columns = {
    "variant": (lambda line: line.variant, "{}"),
    "baseline": (lambda line: line.baseline, "{}"),
    "loss": (lambda line: line.loss, "{}"),
    "verdict": (lambda line: line.judgement.verdict, "{}"),
    "mean gap": (lambda line: line.judgement.mean, "{:+.2f} %"),
    "95 % bounds": (lambda line: line.judgement.bounds, "{0[0]:+.2f} to {0[1]:+.2f} %"),
    "seeds": (lambda line: len(line.judgement.gaps), "{}"),
    "speed": (lambda line: line.speedup, "{:.2f}x"),
    "differing settings other than precision": (lambda line: line.settings, "{}"),
}


def lines_of(results: Iterable[Result], name: Callable[[RunRecord], str]) -> list[Line]:
    """Return the verdicts on the training losses and, where there are any, on the evaluation losses."""
    return [
        Line(name(result.run), name(result.baseline), loss, judgement, result.speedup, settings)
        for result in results
        for settings in [", ".join(gaps.other_settings(result.run, result.baseline)) or None]
        for loss, judgement in result.judgements.items()
    ]


def gaps_over_time(results: Iterable[Result], name: Callable[[RunRecord], str]) -> Table:
    """Return mean gaps with bounds: a row for each of WINDOWS parts of the run, a column per variant."""
    columns: dict[str, dict[tuple[int, int], Judgement]] = {}
    for result in results:
        curves = [gaps.window_gaps(run, baseline, WINDOWS) for run, baseline in result.pairs]
        windows = sorted(set[tuple[int, int]]().union(*curves))
        columns[name(result.run)] = {
            window: Judgement(_percent(curve.get(window) for curve in curves)) for window in windows
        }

    def text(judgement: Judgement | None) -> str | None:
        if judgement is None:
            return None
        bounds = judgement.bounds and "{:+.2f} to {:+.2f}".format(*judgement.bounds)
        return f"{judgement.mean:+.2f} %" + (f" ({bounds})" if bounds else "")

    shown: Columns = {"steps": (lambda window: "{:,}-{:,}".format(*window), "{}")}
    for label, judgements in columns.items():
        shown[label] = (lambda window, judgements=judgements: text(judgements.get(window)), "{}")
    return make_table(shown, sorted({window for judgements in columns.values() for window in judgements}))


def answer(lines: Iterable[Line]) -> str:
    """Return the answer of a comparison in one line: the verdicts on the training losses in words."""
    training = [line for line in lines if line.loss == "training"]
    limit = f"{training[0].judgement.limit:g} % above its baseline's" if training else ""
    parts = []
    if passed := [line.variant for line in training if line.judgement.verdict == "PASS"]:
        parts.append(f"PASS for {', '.join(passed)}: training loss at most {limit}, with 95 % confidence")
    for line in training:
        if (verdict := line.judgement.verdict) != "PASS":
            parts.append(f"{verdict} for {line.variant}: {line.judgement.describe()}")
    return "; ".join(parts) + "." if parts else "Nothing was compared."


@dataclass(frozen=True)
class Verdict:
    """Results of a comparison by variant, the reference's left out; and what became of the other variants."""

    reference: RunRecord
    results: dict[str, Result]
    stopped: dict[str, str]  # variant -> FAIL or SKIPPED, with the reason
    notes: list[str]
    max_loss_gap: float
    price_per_gpu_hour: float | None

    @cached_property
    def lines(self) -> list[Line]:
        names = {id(result.run): name for name, result in self.results.items()}
        return lines_of(self.results.values(), lambda run: names.get(id(run), run.name))

    @property
    def answer(self) -> str:
        return " ".join([answer(self.lines), *(f"{name}: {text}." for name, text in self.stopped.items())])

    @property
    def table(self) -> Table:
        return make_table(LINES, self.lines)

    @property
    def losses(self) -> gaps.Comparison:
        pairs = [pair for result in self.results.values() for pair in result.pairs]
        return gaps.Comparison(self.reference, pairs, {})
