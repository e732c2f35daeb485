"""FP8 LM head on the GPU: kernels against the CPU, and whole runs."""

import json

import pytest
import torch
from fp8_suite.te_models.kernels import loss_fp8
from fp8_suite.te_models.kernels.loss import softmax_cross_entropy
from fp8_suite.te_models.kernels.loss_fp8 import (
    E5M2,
    GRADIENT_SCALE,
    add_labels_to_hidden_grad_,
    add_labels_to_weight_grad_,
    cast,
    cast_gradient,
    linear_cross_entropy_fp8,
)

from tests.gpu.test_run import SMALL, losses, train

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().view(torch.uint8)


@pytest.mark.parametrize("shape", [(16, 32), (1040, 4096), (2048, 1024)])
def test_casts_match_the_cpu_bit_for_bit(shape):
    torch.manual_seed(0)
    x = torch.randn(shape).bfloat16() * 3
    actual, expected = cast(x.to(DEVICE)), cast(x)
    assert torch.equal(bits(actual.rows), bits(expected.rows))
    assert torch.equal(bits(actual.columns), bits(expected.columns))
    assert actual.inverse.item() == pytest.approx(expected.inverse.item(), rel=1e-6)


@pytest.mark.parametrize("rows", [16, 400])
def test_gradients_of_logits_match_the_cpu(rows):
    torch.manual_seed(0)
    logits, labels = (torch.randn(rows, 2064) * 4).bfloat16(), torch.randint(0, 2064, (rows,))
    labels[::3] = -100
    loss, correct, log_sum = softmax_cross_entropy(logits.to(DEVICE), labels.to(DEVICE))
    expected = softmax_cross_entropy(logits, labels)
    assert loss.item() == pytest.approx(expected[0].item(), rel=1e-5) and correct == expected[1]
    torch.testing.assert_close(log_sum.cpu(), expected[2])
    labels[1::3] = -1  # in another rank's part of the vocabulary
    columns = torch.zeros(2064, rows + 32, dtype=torch.uint8, device=DEVICE).view(E5M2)
    actual, at_label = cast_gradient(logits.to(DEVICE), labels.to(DEVICE), log_sum, columns, 16)
    wanted, _ = cast_gradient(logits, labels, log_sum.cpu(), columns.cpu(), 16)
    torch.testing.assert_close(at_label, actual.float().sum(1) / -GRADIENT_SCALE)
    actual = actual.cpu()
    assert (bits(actual) != bits(wanted)).float().mean() < 1e-3  # the last bit of exp differs
    torch.testing.assert_close(actual.float(), wanted.float(), rtol=0.26, atol=0)  # one step of E5M2
    inside = bits(columns)[:, 16 : 16 + rows]
    assert torch.equal(inside, bits(actual).T)
    assert not bits(columns)[:, :16].any() and not bits(columns)[:, 16 + rows :].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "width"), [(16, 48), (1040, 2048)])
def test_label_gradients_match_the_cpu_and_are_deterministic(tokens, width, dtype):
    """One label has half of all tokens, others have few; some have none, or one of another rank's part."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, width).bfloat16(), torch.randn(512, width).bfloat16()
    labels, at_label = torch.randint(0, 512, (tokens,)), torch.rand(tokens)
    labels[::2], labels[::5], labels[1::5] = 7, -100, -1
    at_label[labels < 0] = 0.0

    def added(device):
        by_hidden, by_weight = torch.ones_like(hidden, device=device), weight.to(device, dtype, copy=True)
        on_device = [t.to(device) for t in (labels, at_label)]
        add_labels_to_hidden_grad_(by_hidden, weight.to(device), *on_device)
        add_labels_to_weight_grad_(by_weight, hidden.to(device), *on_device)
        return by_hidden.cpu(), by_weight.cpu()

    actual, again, wanted = added(DEVICE), added(DEVICE), added("cpu")
    for once, same, expected in zip(actual, again, wanted, strict=True):
        assert torch.equal(once, same)
        close = 1e-2 if expected.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(once, expected, rtol=close, atol=close)


@pytest.mark.parametrize("tokens", [16, 300, 1024])
@pytest.mark.parametrize("tokens_per_gemm", [8192, 256])
def test_loss_and_gradients_match_the_cpu(tokens, tokens_per_gemm, monkeypatch):
    monkeypatch.setattr(loss_fp8, "CHUNK_BYTES", 2**20)
    monkeypatch.setattr(loss_fp8, "TOKENS_PER_GEMM", tokens_per_gemm)
    monkeypatch.setattr(loss_fp8, "VOCABULARY_PER_SUM", 512)
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, 512), torch.randn(2048, 512) * 0.1
    labels = torch.randint(0, 2048, (tokens,))
    labels[::5] = -100

    def step(device):
        h, w = (t.bfloat16().to(device).requires_grad_() for t in (hidden, weight))
        out = linear_cross_entropy_fp8(h, w, labels.to(device))
        (out.loss / tokens).backward()
        return out.loss.item(), h.grad.cpu().float(), w.grad.cpu().float()

    (loss, *grads), (expected, *wanted) = step(DEVICE), step("cpu")
    assert loss == pytest.approx(expected, rel=1e-3)
    for grad, reference in zip(grads, wanted, strict=True):
        assert (grad - reference).norm() / reference.norm() < 0.02


@pytest.mark.parametrize("flags", ["", "--no_use_te"])
def test_a_run_with_the_fp8_head_has_nearly_the_same_losses(tmp_path, flags):
    flags = f"{SMALL} --no_deterministic --mixed_precision fp8 --no_export {flags}"
    train(tmp_path / "plain", flags)
    train(tmp_path / "head", f"{flags} --fp8_lm_head")
    rows = json.loads((tmp_path / "head" / "env.json").read_text())["coverage"]["rows"]
    assert {row["precision"] for row in rows if "lm_head" in row["modules"]} == {"fp8 current"}
    plain, head = losses(tmp_path / "plain"), losses(tmp_path / "head")
    assert plain != head and plain == pytest.approx(head, rel=0.02)
