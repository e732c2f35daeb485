"""The README's chart."""

import pytest
from fp8_suite.benchmarks.chart import PRECISIONS, STACKS, chart, find_runs
from fp8_suite.core.packages import ROOT

SAME_WORK = ("model_name", "max_seq_length", "batch_size", "gradient_accumulation_steps", "moment_dtype")


@pytest.mark.parametrize("bars", [STACKS, PRECISIONS], ids=["stacks", "precisions"])
def test_the_bars_of_a_chart_are_runs_of_the_same_work(bars):
    runs = [run for start in bars.values() for run in find_runs(start)]
    assert len({tuple(run.setting(name) for name in SAME_WORK) for run in runs}) == 1
    assert {(run.environment["gpu_name"], run.gpus) for run in runs} == {("NVIDIA H200", 1)}


def test_the_shipped_chart_shows_the_recorded_rates(tmp_path):
    assert chart([str(tmp_path / "chart.svg")]) == 0
    rates = ("10,490", "10,893", "12,509", "13,086", "11,807", "16,606", "17,897")
    for image in (tmp_path / "chart.svg", ROOT / "docs/images/overview.svg"):
        assert all(rate in image.read_text() for rate in rates)
