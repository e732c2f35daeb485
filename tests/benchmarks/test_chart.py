"""The README's chart."""

from fp8_suite.benchmarks.chart import BARS, STUDY, main
from fp8_suite.benchmarks.records.table import read_table
from fp8_suite.core.packages import ROOT

SAME_WORK = ("model_name", "max_seq_length", "batch_size", "gradient_accumulation_steps", "moment_dtype")


def test_the_bars_are_runs_of_the_same_work():
    runs = [run for run in read_table(STUDY) if run.name in BARS.values()]
    assert len(runs) == len(BARS)
    assert len({tuple(run.setting(name) for name in SAME_WORK) for run in runs}) == 1
    assert {(run.environment["gpu_name"], run.gpus) for run in runs} == {("NVIDIA H200", 1)}


def test_the_shipped_chart_shows_the_recorded_rates(tmp_path):
    assert main([str(tmp_path / "chart.svg")]) == 0
    rates = (
        "10,901",
        "11,536 (1.06x)",
        "13,386 (1.23x)",
        "15,468 (1.42x)",
        "16,934 (1.55x)",
        "17,978 (1.65x)",
    )
    for image in (tmp_path / "chart.svg", ROOT / "docs/images/overview.svg"):
        assert all(f">{rate}<" in image.read_text() for rate in rates)
