"""The kernels of cross entropy, optimizer and FP8 exchange, against references."""

import pytest
import torch
import torch.nn.functional as F
from fp8_suite.te_models.kernels import loss as loss_module
from fp8_suite.te_models.kernels.loss import linear_cross_entropy
from fp8_suite.training.optim import moments
from fp8_suite.training.optim.adamw import MasterAdamW, merge_master
from fp8_suite.training.optim.optimizer import (
    OptimizerSpec,
    build_optimizer,
    optimizer_state,
    optimizer_steps,
    step_if,
)
from fp8_suite.training.optim.settings import OptimConfig
from fp8_suite.training.parallel import gradient_exchange
from fp8_suite.training.precision.settings import parse_moment_dtype

from tests.gpu.models import DEVICE

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


def test_the_first_of_equal_logits_is_the_prediction():
    """A few percent of all tokens have equal largest logits in BF16."""
    logits = torch.zeros(4, 20_000, device=DEVICE, dtype=torch.bfloat16)
    logits[:, 3] = logits[:, 4] = logits[:, 19_000] = 5
    labels = torch.tensor([3, 4, 19_000, -100], device=DEVICE)
    _, correct, _ = loss_module.softmax_cross_entropy(logits, labels, write_grad=True)
    assert correct == 1


def gradients(step: int, columns: int = 257) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(step)
    return torch.randn(301, columns, device=DEVICE, generator=generator).bfloat16() * 10.0 ** (step % 5 - 4)


def trained(
    device: torch.device, formats: tuple[str, str], master: bool, columns: int = 257, steps: int = 30
):
    torch.manual_seed(1)
    model = torch.nn.Linear(columns, 301, bias=False).bfloat16().to(device)
    start = model.weight.detach().clone()
    spec = OptimizerSpec("fused_adamw", torch.bfloat16, master, formats)
    optimizer = build_optimizer(model, OptimConfig(learning_rate=1e-2, weight_decay=0.1), spec)
    for step in range(steps):
        model.weight.grad = gradients(step, columns).to(device)
        apply, scale = torch.tensor(step != 3, device=device), torch.tensor(0.5, device=device)
        step_if(optimizer, apply=apply, scale=scale)
    state = {name.removeprefix("weight."): t for name, t in optimizer_state(optimizer, model).items()}
    assert optimizer_steps(optimizer) == steps - 1
    return start, model.weight.detach(), {name: tensor.cpu() for name, tensor in state.items()}


@pytest.mark.parametrize("master", [True, False], ids=["masters", "no-masters"])
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "fp8", "fp8,fp16", "fp32,fp8"])
def test_the_optimizers_kernel_matches_its_reference(name, master):
    """Sizes are not multiples of a program's; one step is skipped."""
    formats = parse_moment_dtype(name)
    columns = 384 if {"fp8", "fp16"} & set(formats) else 257
    start, weight, state = trained(DEVICE, formats, master, columns)
    _, plain_weight, plain = trained(torch.device("cpu"), formats, master, columns)
    weight = weight.cpu()
    from_kernel, reference = weight.float(), plain_weight.float()
    if master:
        from_kernel = merge_master(weight, state["master_param"])
        reference = merge_master(plain_weight, plain["master_param"])
    moved = (reference - start.float().cpu()).norm()
    # Others may round to the neighbor if FP32 values differ in the last bit, and steps then differ.
    exact = name == "fp32" and master
    assert moved > 1 and (from_kernel - reference).norm() < (1e-5 if exact else 3e-2) * moved
    assert {key: tensor.dtype for key, tensor in state.items()} == {k: t.dtype for k, t in plain.items()}
    for moment, form in zip((moments.FIRST, moments.SECOND), formats, strict=True):
        expected, actual = moments.read(plain, moment), moments.read(state, moment)
        error = (actual - expected).norm() / expected.norm()
        assert error < {"fp32": 1e-6, "bf16": 5e-3, "fp16": 1e-3, "fp8": 3e-2}[form], (moment, error)
        if form in ("fp16", "fp8"):
            assert (actual == expected).float().mean() > 0.9, "the same random bits round the same way"


def test_blocks_in_the_kernel_keep_zeros_tiny_values_and_large_ones():
    """Rows of zeros (unused tokens), of 1e-12 and of 1e6, and rows over many binades."""
    scales = torch.tensor([0.0, 1e-12, 1e6, 1.0])[:, None] * 10 ** torch.linspace(0, -4, 256)
    weights = []
    for device in (DEVICE, torch.device("cpu")):
        weight = torch.nn.Parameter(torch.zeros(4, 256, device=device))
        settings = {"lr": 1.0, "betas": (0.9, 0.999), "eps": 1e-30}
        adamw = MasterAdamW(
            [{"params": [weight]}], **settings, master_weights=True, moment_dtypes=("fp8", "fp8")
        )
        for step in range(20):
            generator = torch.Generator().manual_seed(step)
            weight.grad = ((0.5 + torch.rand(4, 256, generator=generator)) * scales).to(device)
            adamw.step()
        weights.append(weight.detach().cpu())
    assert not weights[0][0].any() and weights[0].isfinite().all()
    # Adam moves each by about 1 a step, whatever the gradient's magnitude.
    assert (weights[0][1:] + 20).abs().max() < 6
    torch.testing.assert_close(*weights, rtol=0.05, atol=1)


def test_fp32_masters_follow_transformer_engines_optimizer():
    """Compare with TE's FusedAdam, which has full FP32 master weights, on the same gradients."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    torch.manual_seed(1)
    start = torch.nn.Linear(257, 301, bias=False).weight.bfloat16().to(DEVICE)
    te_weight = torch.nn.Parameter(start.clone())
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    full = FusedAdam([te_weight], **settings, master_weights=True)
    for step in range(30):
        if step != 3:
            te_weight.grad = gradients(step) * 0.5
            full.step()
    _, weight, state = trained(DEVICE, ("fp32", "fp32"), True)
    master, expected = (
        merge_master(weight, state["master_param"].to(DEVICE)),
        full.state[te_weight]["master_param"],
    )
    moved = (expected - start.float()).abs().median()
    assert moved > 0 and (master - expected).abs().max() < 1e-4 * moved


@pytest.mark.parametrize("width", [3, 2048, 9000, 70_001])
@pytest.mark.parametrize("rows", [2, 3, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_the_fp8_exchange_match_their_references(dtype, rows, width):
    from fp8_suite.training.parallel import gradient_exchange_triton as kernels

    magnitudes = 10.0 ** torch.linspace(-44, 37, width, device=DEVICE)
    values = (torch.randn(rows, width, device=DEVICE) * magnitudes).to(dtype)
    packed = kernels.pack_fp8(values)
    padding = -width % (kernels.BLOCK.value * kernels.BLOCKS.value)
    assert torch.equal(packed, gradient_exchange.pack_fp8(F.pad(values, (0, padding))))
    decoded, expected = torch.empty_like(values), torch.empty_like(values)
    kernels.decode_fp8(packed, decoded)
    gradient_exchange.decode_fp8(packed, expected)
    assert torch.equal(decoded, expected)
    terms = torch.empty(rows, width, device=DEVICE)
    gradient_exchange.decode_fp8(packed, terms)
    for mean in (True, False):
        total = torch.empty(width, device=DEVICE)
        kernels.sum_fp8(packed, total, mean=mean)
        divisor = rows if mean else 1
        error = (total - terms.double().sum(0) / divisor).abs()
        # FP32 sums, the factor and its product round by 2**-24 each, or to a multiple of 2**-149.
        assert (error <= terms.double().abs().sum(0) / divisor * (rows + 1) * 2**-24 + 2.0**-149).all()


def test_the_fp8_exchange_passes_its_self_test():
    assert gradient_exchange.self_test() is None


def test_an_fp8_exchange_of_more_than_2_31_values():
    from fp8_suite.training.parallel import gradient_exchange_triton as kernels

    last = 5000
    values = torch.zeros(2, 2**30 + last, device=DEVICE, dtype=torch.bfloat16)
    values[:, -last:] = torch.randn(2, last, device=DEVICE)
    decoded, expected = torch.empty_like(values), values.new_empty(2, last)
    kernels.decode_fp8(kernels.pack_fp8(values), decoded)
    gradient_exchange.decode_fp8(gradient_exchange.pack_fp8(values[:, -last:]), expected)
    assert torch.equal(decoded[:, -last:], expected) and not decoded[:, :-last].any()
