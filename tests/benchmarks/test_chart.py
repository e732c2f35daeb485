"""The README's chart."""

from benchmarks.chart import chart
from core.packages import ROOT


def test_the_shipped_chart_shows_the_recorded_rates(tmp_path):
    assert chart([str(tmp_path / "chart.svg")]) == 0
    for image in (tmp_path / "chart.svg", ROOT / "docs/images/overview.svg"):
        assert all(rate in image.read_text() for rate in ("10,401", "12,413", "11,807", "16,606", "17,897"))
