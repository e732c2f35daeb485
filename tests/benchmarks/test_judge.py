"""The test of non-inferiority: t quantiles, bounds, verdicts, and the recorded spread between seeds."""

import json
import math
from dataclasses import replace
from statistics import stdev

import numpy as np
import pytest
from fp8_suite.benchmarks.records.table import from_row, read_table, to_row
from fp8_suite.benchmarks.report import gaps, judge
from fp8_suite.benchmarks.report.gaps import pick_reference
from fp8_suite.benchmarks.report.judge import Judgement
from fp8_suite.core.files import to_json

from tests.benchmarks.folders import trained


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    {1: 6.3138, 2: 2.9200, 3: 2.3534, 4: 2.1318, 9: 1.8331, 10: 1.8125, 99: 1.6604}.items(),
)
def test_quantiles_of_student_s_t_are_those_of_the_tables(freedom, quantile):
    assert judge.t_quantile(freedom) == pytest.approx(quantile, abs=5e-5)


@pytest.mark.parametrize(
    ("gaps", "verdict", "bounds"),
    [
        ((0.1, 0.2, 0.3), "PASS", (0.0314, 0.3686)),  # 0.2 -+ 2.92 x 0.1 / sqrt(3)
        ((0.9, 1.0, 1.1), "FAIL", (0.8314, 1.1686)),
        ((0.3, 0.4, 0.5), "INCONCLUSIVE", (0.2314, 0.5686)),
        ((0.0, 0.2), "INCONCLUSIVE", (-0.5314, 0.7314)),  # 0.1 -+ 6.314 x 0.1414 / sqrt(2)
        ((-0.45,), "INCONCLUSIVE", None),
        ((), "INCONCLUSIVE", None),
    ],
)
def test_a_verdict_follows_from_the_bounds(gaps, verdict, bounds):
    judgement = Judgement(gaps, 0.5)
    assert judgement.verdict == verdict
    assert judgement.bounds == (bounds and pytest.approx(bounds, abs=1e-4))


@pytest.mark.parametrize(
    ("gaps", "limit", "further"),
    [
        ((0.0, 0.2), 0.5, 1),  # with 3 pairs 2.920 x 0.1414 / sqrt(3) = 0.238 < 0.4
        ((0.3, 0.4, 0.5), 0.5, 2),  # with 5 pairs 2.132 x 0.1 / sqrt(5) = 0.095 < 0.1
        ((0.4, 0.6), 0.5, None),  # the mean is the limit: never
        ((0.1, 0.2, 0.3), 0.5, None),  # decided
        ((0.1,), 0.5, None),  # no spread seen
    ],
)
def test_further_seeds_would_decide_at_the_spread_seen(gaps, limit, further):
    assert Judgement(gaps, limit).further_seeds == further


def test_the_spread_is_that_of_the_recorded_studies():
    gaps = []
    for study in ("thousand_steps/te", "fp8-moments/1b/beta2-0.95", "fp8-moments/1b/beta2-0.999"):
        runs = read_table(study)
        results = judge.judge_runs(runs, pick_reference(runs)).results
        gaps += [result.training.gaps for result in results if len(result.pairs) > 1]
    degrees = sum(len(values) - 1 for values in gaps)
    spread = math.sqrt(sum(stdev(values) ** 2 * (len(values) - 1) for values in gaps) / degrees)
    assert len(gaps) == 7 and spread == pytest.approx(judge.RECORDED_SPREAD, abs=0.005)


def test_gaps_over_time_survive_the_record(tmp_path):
    """Windows of 500 steps: by hand, of the logged losses, and of the thinned curves of the table."""
    step = np.arange(1, 5001)
    noise = np.random.default_rng(0).normal(size=(2, 5000)) * 0.1
    runs = []
    for seed, base in enumerate(2 + noise + 4 / np.sqrt(step)):
        window = (step - 1) // 500
        for recipe, losses in {"bf16": base, "delayed": base * (1 + 1.1e-4 * (seed + 1) * window)}.items():
            run = trained(tmp_path / f"{recipe}-{seed}", [1.0], recipe, seed=seed)
            rows = [{"step": n, "train/loss": loss} for n, loss in enumerate(losses.tolist(), 1)]
            runs.append(replace(run, records=rows))
    recorded = [from_row(json.loads(to_json(to_row(run, "study", "tiny-llama")))) for run in runs]
    assert max(len(run.records) for run in recorded) <= 200
    for records in (runs, recorded):
        results = judge.judge_runs(records, records[0]).results
        table = judge.gaps_over_time(results)
        assert table.headings == ["steps", "delayed-0"] and len(table.rows) == 10
        assert [row[0] for row in table.rows][::9] == ["1-500", "4,501-5,000"]
        for number, (_, cell) in enumerate(table.rows):  # gaps g and 2g, g = 0.011 % x number
            mean, margin = 0.0165 * number, 6.3138 * 0.0055 * number
            assert cell == f"{mean:+.2f} % ({mean - margin:+.2f} to {mean + margin:+.2f})", cell
        assert results[0].training.gaps == pytest.approx((0.099, 0.198), abs=1e-5)
    assert gaps.window_gaps(runs[1], replace(runs[0], records=runs[0].records[:9]), 10) == {}


def test_final_losses_are_judged_in_every_form(tmp_path):
    """The BF16 loss of an FP8 run is compared with the baseline's loss, which is in BF16 already."""
    runs = []
    for seed in (1, 2):
        for recipe, factor in (("bf16", 1.0), ("delayed", 1.01)):
            run = trained(tmp_path / f"{recipe}-{seed}", [2.0], recipe, seed=seed)
            exports = {"export_loss_bf16": 1.5 * factor**2, "export_loss_fp8": 1.5 * factor**3}
            in_bf16 = {} if recipe == "bf16" else {"eval_loss_bf16": 1.5 * 1.04}
            runs.append(replace(run, summary=run.summary | {"eval_loss": 1.5 * factor} | exports | in_bf16))
    (result,) = judge.judge_runs(runs, runs[0]).results
    final = judge.judge_final_losses(result.pairs, 0.5)
    means = {name: judgement.mean for name, judgement in final.items()}
    expected = {"evaluation": 1.0, "evaluation in BF16": 4.0, "export": 2.01, "FP8 export": 3.0301}
    assert means == pytest.approx(expected) and {j.verdict for j in final.values()} == {"FAIL"}
    runs[1] = replace(runs[1], summary=runs[1].summary | {"export_loss_fp8": math.nan})
    (result,) = judge.judge_runs(runs, runs[0]).results
    assert result.judgements["FP8 export"].reason == "its FP8 export loss is not finite"


def test_runs_are_paired_by_seed_and_setting(tmp_path):
    """A run of older code, without the setting, is no repetition of one that sets it."""
    runs = [trained(tmp_path / f"bf16-{seed}", [2.0 + seed], seed=seed) for seed in (1, 2)]
    runs += [trained(tmp_path / f"block-{seed}", [2.02 + 1.01 * seed], "block", seed=seed) for seed in (1, 2)]
    del runs[2].config["fp8_fp32_scales"]
    scales = {"seed": 2, "fp8_fp32_scales": True}
    runs.append(trained(tmp_path / "block-scales-2", [4.2], "block", **scales))
    verdict = judge.judge_runs(runs, runs[0])
    results = verdict.results
    names = [[(run.name, baseline.name) for run, baseline in result.pairs] for result in results]
    assert names == [[("block-1", "bf16-1"), ("block-2", "bf16-2")], [("block-scales-2", "bf16-2")]]
    assert results[0].training.mean == pytest.approx(1.0)
    assert [line.loss for line in judge.lines_of(results)] == ["training", "evaluation"] * 2
    assert verdict.answer.startswith("FAIL for block-1: mean gap +1.00 % over 2 seeds")
    assert "block-scales-2, training: gap +5.00 % with one seed, which does not decide" in verdict.notes[2]


def test_two_starts_with_equal_settings_are_not_mixed(tmp_path):
    losses = {"bf16": 2.0, "near": 2.02, "far": 2.2}
    recipes = {"bf16": "bf16", "near": "block", "far": "block"}
    runs = [
        trained(tmp_path / f"{name}-{seed}", [losses[name] * seed], recipes[name], seed=seed)
        for name in losses
        for seed in (1, 2)
    ]
    results = judge.judge_runs(runs, runs[0]).results
    gaps = {result.name: result.training.gaps for result in results}
    assert gaps == {"near-1": pytest.approx((1.0, 1.0)), "far-1": pytest.approx((10.0, 10.0))}
