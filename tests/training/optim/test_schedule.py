"""Learning rates of the schedules, by hand: 100 steps, 10 of warm-up, peak 1, floor 0.1."""

import pytest
from fp8_suite.training.optim.schedule import learning_rate
from fp8_suite.training.optim.settings import OptimConfig


@pytest.mark.parametrize(
    ("scheduler", "rates"),
    [
        ("cosine", {0: 0.1, 9: 1.0, 10: 1.0, 55: 0.55, 100: 0.1, 500: 0.1}),
        ("linear", {32: 0.78}),
        ("constant", {99: 1.0}),
        ("wsd", {9: 1.0, 80: 1.0, 90: 0.55, 99: 0.145, 100: 0.1}),  # stable until step 80
    ],
)
def test_warm_up_and_decay(scheduler, rates):
    cfg = OptimConfig(
        learning_rate=1.0, lr_scheduler=scheduler, min_lr_ratio=0.1, num_warmup_steps=10, decay_ratio=0.2
    )
    assert {step: learning_rate(step, cfg, 100) for step in rates} == pytest.approx(rates)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"warmup_ratio": 0.2}, [1 / 2, 1, 1]),
        ({"warmup_ratio": 0.25}, [1 / 3, 2 / 3, 1]),  # 2.5 steps are rounded up
        ({"num_warmup_steps": 0}, [1, 1, 1]),
    ],
)
def test_warm_up_steps_come_from_the_ratio_unless_given(settings, expected):
    cfg = OptimConfig(learning_rate=1.0, lr_scheduler="constant", **settings)
    assert [learning_rate(step, cfg, 10) for step in range(3)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"warmup_ratio": 0.25}, [1 / 4, 2 / 4, 4 / 4, 1, 3 / 4]),  # 4 of 16 tokens, then 12 of decay
        ({"num_warmup_steps": 3}, [1 / 4, 2 / 4, 4 / 4, 1, 3 / 4]),  # the tokens of the first 3 steps
        ({"warmup_ratio": 3 / 16}, [1 / 3, 2 / 3, 1, 12 / 13, 9 / 13]),  # ends within the third step
        ({"num_warmup_steps": 0, "lr_scheduler": "wsd", "decay_ratio": 0.5}, [1, 1, 1, 1, 1, 3 / 8]),
    ],
)
def test_with_a_growing_batch_warm_up_and_decay_go_by_tokens(settings, rates):
    """Steps of 1, 1, 2, 3, 6, 3 tokens."""
    tokens = [0, 1, 2, 4, 7, 13, 16]
    cfg = OptimConfig(**{"learning_rate": 1.0, "lr_scheduler": "linear"} | settings)
    got = [learning_rate(step, cfg, 6, tokens.__getitem__) for step in range(len(rates))]
    assert got == pytest.approx(rates)
