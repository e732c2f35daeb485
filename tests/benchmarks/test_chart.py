"""The README's chart."""

import pytest
from fp8_suite.benchmarks.chart import chart
from fp8_suite.core.errors import UserError
from fp8_suite.core.packages import ROOT


def test_the_shipped_chart_shows_the_recorded_rates(tmp_path):
    assert chart([str(tmp_path / "chart.svg")]) == 0
    for image in (tmp_path / "chart.svg", ROOT / "docs/images/overview.svg"):
        assert all(rate in image.read_text() for rate in ("10,401", "12,413", "11,807", "16,606", "17,897"))


def test_a_file_that_is_no_image_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"chart\.txt: not a \.svg or \.png file"):
        chart([str(tmp_path / "chart.txt")])
