"""The loss scale of FP16: its rule, its state, and steps with scaled gradients."""

import pytest
import torch
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.optim import loss_scale
from fp8_suite.training.optim.loss_scale import INITIAL_SCALE, LossScale
from fp8_suite.training.optim.optimizer import build_optimizer, choose_optimizer, optimizer_state
from fp8_suite.training.parallel.strategies import Strategy
from torch import nn

CPU = torch.device("cpu")
FLAG = {True: torch.tensor(True), False: torch.tensor(False)}


def test_the_scale_is_grad_scaler_s_down_to_one(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 3)
    scale = LossScale(CPU)
    expected, good_steps = torch.tensor([INITIAL_SCALE]), torch.zeros(1, dtype=torch.int32)
    for overflow in (torch.rand(200, generator=torch.manual_seed(0)) < 0.2).tolist():
        scale.update(applied=FLAG[not overflow], overflow=FLAG[overflow])
        torch._amp_update_scale_(expected, good_steps, torch.tensor([float(overflow)]), 2.0, 0.5, 3)
        assert scale.state() == {"scale": expected.item(), "good_steps": good_steps.item()}
    for _ in range(100):
        scale.update(applied=FLAG[False], overflow=FLAG[True])
    assert scale.value == 1


def test_a_restored_scale_grows_at_the_same_step_and_other_skips_change_nothing():
    scale, restored = LossScale(CPU), LossScale(CPU)
    for _ in range(loss_scale.GROWTH_INTERVAL - 1):
        scale.update(applied=FLAG[True], overflow=FLAG[False])
    scale.update(applied=FLAG[False], overflow=FLAG[False])  # no label tokens, or a loss that is not finite
    assert scale.value == INITIAL_SCALE == 2**16
    restored.load(scale.state())
    restored.update(applied=FLAG[True], overflow=FLAG[False])
    assert restored.state() == {"scale": 2 * INITIAL_SCALE, "good_steps": 0}


@pytest.mark.parametrize("settings", [{}, {"moment_dtype": "fp8"}])
@pytest.mark.parametrize("max_norm", [0.0, 0.5, 100.0])
def test_steps_clipping_and_norm_are_those_of_unscaled_gradients(settings, max_norm):
    results = {}
    for precision in ("fp32", "fp16"):
        cfg = config_from_dict({"mixed_precision": precision, "weight_decay": 0.1} | settings)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 5), nn.Linear(5, 1))
        strategy = Strategy("single", CPU, cfg)
        optimizer = build_optimizer(model, cfg.optim, choose_optimizer(cfg, "single", on_gpu=False))
        norms = []
        for _ in range(3):
            strategy.backward(model, model(torch.randn(7, 64)).square().sum())
            outcome = strategy.step(model, optimizer, usable=FLAG[True], max_norm=max_norm)
            norms.append(outcome.grad_norm)
        results[precision] = [*norms, *model.parameters(), *optimizer_state(optimizer, model).values()]
    assert len(results["fp16"]) > 7
    assert all(map(torch.equal, *results.values())), "a power of two changes no bit"
