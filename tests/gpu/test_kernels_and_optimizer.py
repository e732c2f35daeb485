"""The cross-entropy kernel and the optimizer's lossless master weights, against references."""

import pytest
import torch
import torch.nn.functional as F

from te_models import loss as loss_module
from te_models.loss import linear_cross_entropy
from tests.gpu.models import DEVICE
from training.optim.adamw import merge_master
from training.optim.optimizer import (
    OptimizerPlan,
    build_optimizer,
    optimizer_state,
    optimizer_steps,
    step_if,
)
from training.optim.settings import OptimConfig

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


@pytest.mark.parametrize("device", [DEVICE, "cpu"])
def test_the_first_of_equal_logits_is_the_prediction(device):
    """A few percent of all tokens have equal largest logits in BF16."""
    logits = torch.zeros(4, 20_000, device=device, dtype=torch.bfloat16)
    logits[:, 3] = logits[:, 4] = logits[:, 19_000] = 5
    labels = torch.tensor([3, 4, 19_000, -100], device=device)
    _, correct, _ = loss_module.softmax_cross_entropy(logits, labels, write_grad=True)
    assert correct == 1


def test_a_batch_without_labels_gives_zero_loss_and_gradient():
    hidden = torch.randn(16, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(1000, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.full((16,), -100, device=DEVICE)).loss
    loss.backward()
    assert loss.item() == 0 and not hidden.grad.any() and not weight.grad.any()


def gradients(step: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(step)
    return torch.randn(300, 257, device=DEVICE, generator=generator).bfloat16() * 10.0 ** (step % 5 - 4)


def trained(device: torch.device, moments: torch.dtype, master: bool, steps: int = 30):
    torch.manual_seed(1)
    model = torch.nn.Linear(257, 300, bias=False).bfloat16().to(device)
    plan = OptimizerPlan("fused_adamw", torch.bfloat16, master, moments)
    optimizer = build_optimizer(model, OptimConfig(learning_rate=1e-2, weight_decay=0.1), plan)
    for step in range(steps):
        model.weight.grad = gradients(step).to(device)
        apply, scale = torch.tensor(step != 3, device=device), torch.tensor(0.5, device=device)
        step_if(optimizer, apply=apply, scale=scale, gradients=[model.weight.grad])
    state = {name.removeprefix("weight."): t for name, t in optimizer_state(optimizer, model).items()}
    assert optimizer_steps(optimizer) == steps - 1
    return model.weight.detach(), state


@pytest.mark.parametrize("master", [True, False], ids=["masters", "no-masters"])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_optimizers_kernel_matches_its_reference(moments, master):
    """Sizes are not multiples of a block; one step is skipped."""
    weight, state = trained(DEVICE, moments, master)
    plain_weight, plain = trained(torch.device("cpu"), moments, master)
    if master:
        one, other = merge_master(weight, state["master_param"]).cpu(), plain_weight
        other = merge_master(other, plain["master_param"])
    else:
        one, other = weight.float().cpu(), plain_weight.float()
    torch.manual_seed(1)
    moved = (other - torch.nn.Linear(257, 300, bias=False).weight.bfloat16().float()).norm()
    # BF16 moments and weights may round differently if FP32 values differ in the last bit.
    exact = moments == torch.float32 and master
    assert moved > 1 and (one - other).norm() < (1e-5 if exact else 3e-2) * moved
    for name in ("exp_avg", "exp_avg_sq"):
        assert state[name].dtype == moments
        error = (state[name].cpu().float() - plain[name].float()).norm() / plain[name].float().norm()
        assert error < (1e-6 if moments == torch.float32 else 5e-3), (name, error)


def test_fp32_masters_follow_transformer_engines_optimizer():
    """Compare with TE's FusedAdam, which has full FP32 master weights, on the same gradients."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    torch.manual_seed(1)
    start = torch.nn.Linear(257, 300, bias=False).weight.bfloat16().to(DEVICE)
    theirs = torch.nn.Parameter(start.clone())
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    full = FusedAdam([theirs], **settings, master_weights=True)
    for step in range(30):
        if step != 3:
            theirs.grad = gradients(step) * 0.5
            full.step()
    weight, state = trained(DEVICE, torch.float32, True)
    master, expected = merge_master(weight, state["master_param"]), full.state[theirs]["master_param"]
    moved = (expected - start.float()).abs().median()
    assert moved > 0 and (master - expected).abs().max() < 1e-4 * moved
