"""FP16 on a GPU: TE and Hugging Face layers against BF16, exact resume, the head's gradient, no waits."""

import json

import pytest
import torch
from fp8_suite.te_models.kernels.loss import linear_cross_entropy
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.optim.optimizer import build_optimizer, choose_optimizer
from fp8_suite.training.parallel.strategies import Strategy
from torch import nn

from tests.gpu.test_run import LONG, SMALL, checkpoint, losses, train

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize(
    "layers",
    [
        "--use_te",
        "--use_te --no_packing",
        "--use_te --recompute cheap --gradient_accumulation_steps 2",
        "--no_use_te",
        "--no_use_te --no_packing --no_compile",
        "--no_use_te --recompute layer --moment_dtype fp8",
    ],
)
def test_fp16_trains_like_bf16(layers, tmp_path):
    """Every GEMM runs in FP16; the steps that overflow are few."""
    for precision in ("bf16", "fp16"):
        flags = f"{SMALL} {layers} --mixed_precision {precision} --no_save_checkpoints --no_export"
        train(tmp_path / precision, flags)
    rows = json.loads((tmp_path / "fp16" / "env.json").read_text())["coverage"]["rows"]
    assert {row["precision"] for row in rows} == {"fp16"}
    summary = json.loads((tmp_path / "fp16" / "summary.json").read_text())
    assert summary["skipped_steps"] == summary["overflow_steps"] <= 4
    expected, actual = losses(tmp_path / "bf16"), losses(tmp_path / "fp16")
    skipped = summary["skipped_steps"]
    gaps = [abs(actual[step] - expected[step]) / expected[step] for step in expected]
    print(layers, f"{skipped} overflows, loss gaps {gaps[0]:.1e}, {max(gaps):.1e}")
    assert gaps[0] < 1e-3 and max(gaps) < (0.02 if skipped == 0 else 0.2)


@pytest.mark.parametrize("layers", ["--use_te", "--no_use_te"])
def test_a_resumed_run_in_fp16_is_bit_for_bit_the_uninterrupted_one(layers, tmp_path):
    flags = f"{SMALL} {layers} --mixed_precision fp16 --no_export --save_interval 20 --max_steps {LONG}"
    train(tmp_path / "whole", flags)
    half = tmp_path / "whole" / "checkpoints" / "step_000020"
    train(tmp_path / "resumed", f"{flags} --resume {half}")
    whole, resumed = losses(tmp_path / "whole"), losses(tmp_path / "resumed")
    assert resumed == {step: loss for step, loss in whole.items() if step > 20}
    expected, actual = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "resumed")
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, actual[name])] == []
    last = f"checkpoints/step_{LONG:06}/meta.json"
    scales = [
        json.loads((tmp_path / name / last).read_text())["progress"]["loss_scale"]
        for name in ("whole", "resumed")
    ]
    assert scales[0] == scales[1] and scales[0]["scale"] >= 2**8


@pytest.mark.parametrize("tokens", [4000, 40000])
def test_the_head_s_gradient_may_exceed_fp16_before_it_is_scaled(tokens):
    h = torch.full((tokens, 64), 40.0, device=DEVICE).half()
    w = torch.zeros(5000, 64, device=DEVICE).half().requires_grad_()
    loss = linear_cross_entropy(h, w, torch.zeros(tokens, dtype=torch.int64, device=DEVICE)).loss
    (loss / tokens).backward()
    expected = torch.full((5000, 64), 40.0 / 5000, device=DEVICE)
    expected[0] -= 40
    torch.testing.assert_close(w.grad.float(), expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_scaled_steps_are_those_of_unscaled_gradients_and_do_not_wait_for_the_gpu(moments):
    results = []
    for precision in ("fp32", "fp16"):
        cfg = config_from_dict({"mixed_precision": precision, "moment_dtype": moments})
        torch.manual_seed(0)
        model, strategy = nn.Linear(64, 64, device=DEVICE), Strategy("single", DEVICE, cfg)
        optimizer = build_optimizer(model, cfg.optim, choose_optimizer(cfg, "single", on_gpu=True))
        usable = torch.ones((), dtype=torch.bool, device=DEVICE)
        batches = torch.randn(4, 8, 64, device=DEVICE)
        for number, batch in enumerate(batches):
            if number == 1:  # the first step compiles kernels
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            strategy.backward(model, model(batch).square().sum())
            outcome = strategy.step(model, optimizer, usable=usable, max_norm=1.0)
        torch.cuda.set_sync_debug_mode("default")
        results.append([outcome.grad_norm, *model.parameters()])
    assert all(map(torch.equal, *results)), "a power of two changes no bit"
    for _ in range(3):
        strategy.backward(model, model(batch).sum() * 1e38)
        assert not strategy.step(model, optimizer, usable=usable, max_norm=1.0).applied
    assert strategy.loss_scale.state() == {"scale": 2.0**13, "good_steps": 0}
