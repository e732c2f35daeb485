"""Rates and reductions of logged metrics."""

import math

import pytest
from fp8_suite.training.tracking.metrics import METRICS, RATES, perplexity, tail_mean


def test_perplexity_and_rates():
    assert perplexity(2.0) == pytest.approx(7.389056)
    assert perplexity(1000.0) == perplexity(math.inf) == math.inf
    assert math.isnan(perplexity(math.nan))
    assert RATES and all(name.startswith("perf/") and METRICS[name].summary == "median" for name in RATES)


@pytest.mark.parametrize(("count", "expected"), [(1, 1.0), (9, 9.0), (20, 19.5), (29, 28.5), (30, 29.0)])
def test_the_tail_mean_covers_the_last_tenth(count, expected):
    assert tail_mean([float(i) for i in range(1, count + 1)]) == expected
