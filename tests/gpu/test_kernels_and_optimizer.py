"""The cross-entropy kernel and the optimizer's lossless masters, against plain references."""

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.models import DEVICE
from training import loss as loss_module
from training.config import OptimConfig
from training.loss import linear_cross_entropy
from training.optim import OptimizerPlan, build_optimizer, optimizer_state

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("chunk_bytes", [2**30, 2**20], ids=["one-chunk", "many-chunks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_cross_entropy_matches_float64(dtype, chunk_bytes, monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", chunk_bytes)
    hidden = torch.randn(700, 256, device=DEVICE).to(dtype).requires_grad_()
    weight = (torch.randn(10_001, 256, device=DEVICE) * 0.2).to(dtype).requires_grad_()
    labels = torch.randint(0, 10_001, (700,), device=DEVICE)
    labels[::3] = -100
    out = linear_cross_entropy(hidden, weight, labels)
    (out.loss / 500).backward()
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = h @ w.T
    expected = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    (expected / 500).backward()
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    assert out.loss.item() == pytest.approx(expected.item(), rel=tolerance / 10)
    assert (hidden.grad.double() - h.grad).norm() / h.grad.norm() < tolerance
    assert (weight.grad.double() - w.grad).norm() / w.grad.norm() < tolerance
    right = ((logits.argmax(-1) == labels) & (labels != -100)).sum().item()
    assert abs(out.correct.item() - right) <= (0 if dtype == torch.float32 else 3)


def test_a_batch_without_labels_gives_zero_loss_and_gradient():
    hidden = torch.randn(16, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(1000, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.full((16,), -100, device=DEVICE)).loss
    loss.backward()
    assert loss.item() == 0 and not hidden.grad.any() and not weight.grad.any()


def masters(optimizer, model) -> dict[str, torch.Tensor]:
    """FP32 weights rebuilt from BF16 weights and 16-bit remainders (a negative one marks rounding up)."""
    out = {}
    state = optimizer_state(optimizer, model)
    for name, p in model.named_parameters():
        remainder = state[f"{name}.master_param"]
        if remainder.dtype == torch.float32:
            out[name] = remainder.clone()
            continue
        high = p.detach().view(torch.int16).to(torch.int32)
        high = torch.where(remainder < 0, high - 1, high)
        out[name] = ((high << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)
    return out


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_remainders_are_lossless_fp32_masters(moments):
    """BF16 weights with 16-bit remainders follow, bit by bit, the same run with full FP32 masters."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    torch.manual_seed(1)
    models = [torch.nn.Linear(256, 256, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plan = OptimizerPlan("te_fused_adam", torch.bfloat16, True, moments)
    cfg = OptimConfig(learning_rate=1e-5, weight_decay=0.1)
    ours = build_optimizer(models[0], cfg, plan)
    groups = [
        dict(g, params=list(p))
        for g, p in zip(
            ({"weight_decay": 0.1}, {"weight_decay": 0.0}),
            ([models[1].weight], [models[1].bias]),
            strict=True,
        )
    ]
    full = FusedAdam(
        groups,
        lr=1e-5,
        betas=(0.9, 0.95),
        eps=1e-8,
        master_weights=True,
        exp_avg_dtype=moments,
        exp_avg_sq_dtype=moments,
    )
    moved = 0.0
    for _ in range(50):
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        before = masters(ours, models[0])["weight"]
        ours.step()
        full.step()
        moved += (masters(ours, models[0])["weight"] - before).abs().mean().item()
    mine, theirs = masters(ours, models[0]), masters(full, models[1])
    assert moved > 0
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert (a - b).abs().max() <= 2**-8 * b.abs().max()
