"""Fused LM head and cross entropy against torch's cross entropy."""

import pytest
import torch
import torch.nn.functional as F
from fp8_suite.te_models.kernels import loss as loss_module
from fp8_suite.te_models.kernels.loss import linear_cross_entropy, logits_cross_entropy


def case(tokens=300, hidden=16, vocab=50):
    torch.manual_seed(0)
    h = torch.randn(tokens, hidden, requires_grad=True)
    w = torch.randn(vocab, hidden, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,))
    labels[::3] = -100
    return h, w, labels


@pytest.mark.parametrize("chunk_bytes", [2**30, 1], ids=["one-chunk", "many-chunks"])
def test_loss_gradients_and_accuracy_match_torch(chunk_bytes, monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", chunk_bytes)
    h, w, labels = case()
    logits = h @ w.T
    expected = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    correct = ((logits.argmax(-1) == labels) & (labels != -100)).sum()
    for out in (linear_cross_entropy(h, w, labels), logits_cross_entropy(logits, labels)):
        torch.testing.assert_close(out.loss, expected)
        assert out.correct == correct
    out = linear_cross_entropy(h, w, labels)
    grads, expected_grads = (torch.autograd.grad(loss / 7, (h, w)) for loss in (out.loss, expected))
    torch.testing.assert_close(grads, expected_grads)
    frozen = linear_cross_entropy(h.detach(), w, labels).loss / 7
    assert torch.equal(torch.autograd.grad(frozen, w)[0], grads[1]), "the head trains on frozen hidden states"
    with torch.no_grad():
        evaluated = linear_cross_entropy(h, w, labels).loss
    assert not evaluated.requires_grad and torch.equal(evaluated, out.loss)


@pytest.mark.parametrize("write_grad", [False, True])
def test_the_first_of_equal_logits_is_the_prediction(write_grad):
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0]]).repeat(3, 1)
    labels = torch.tensor([1, 2, -100])
    assert loss_module.softmax_cross_entropy(logits, labels, write_grad=write_grad)[1] == 1


def test_a_batch_without_labels_has_zero_loss_and_gradient():
    h, w, labels = case()
    out = linear_cross_entropy(h, w, torch.full_like(labels, -100))
    out.loss.backward()
    assert out.loss == 0 and out.correct == 0 and not h.grad.any() and not w.grad.any()


def test_the_projection_runs_in_the_autocast_dtype():
    h, w, labels = case()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = linear_cross_entropy(h, w, labels).loss
    exact = linear_cross_entropy(h, w, labels).loss
    assert rough.dtype == torch.float32 and rough != exact
    torch.testing.assert_close(rough, exact, rtol=1e-2, atol=0)
    rough.backward()
    assert h.grad.dtype == w.grad.dtype == torch.float32


def test_softmax_is_computed_in_fp32_from_bf16_logits_and_stays_finite():
    h, w, labels = (t.detach() for t in case())
    h, w = h.bfloat16(), w.bfloat16()
    expected = F.cross_entropy((h @ w.T).float(), labels, ignore_index=-100, reduction="sum")
    for out in (linear_cross_entropy(h, w, labels), logits_cross_entropy(h @ w.T, labels)):
        assert out.loss.dtype == torch.float32
        torch.testing.assert_close(out.loss, expected)
    h, w = torch.full((4, 2), 300.0), torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    assert linear_cross_entropy(h, w, torch.tensor([0, 1, -100, 0])).loss.item() == pytest.approx(1200.0)


@pytest.mark.parametrize("autocast", [False, True])
def test_in_fp16_a_head_s_gradient_may_exceed_its_range_before_it_is_scaled(autocast):
    """Backward divides the sum over tokens by their number."""
    h, w, labels = torch.full((4000, 16), 40.0), torch.zeros(50, 16), torch.zeros(4000, dtype=torch.int64)
    h, w = (t if autocast else t.half() for t in (h, w))
    w.requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
        loss = linear_cross_entropy(h, w, labels).loss
    (loss / len(h)).backward()
    expected = torch.cat([torch.full((1, 16), -40.0 * 49 / 50), torch.full((49, 16), 40.0 / 50)])
    torch.testing.assert_close(w.grad.float(), expected, rtol=1e-3, atol=0)


def test_chunks_are_summed_in_fp32(monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 1)
    h, w, labels = case(tokens=128 * 30)
    linear_cross_entropy(h.bfloat16(), w.bfloat16(), labels).loss.backward()
    rough, w.grad = w.grad, None
    linear_cross_entropy(h.bfloat16().float(), w.bfloat16().float(), labels).loss.backward()
    assert (rough - w.grad).norm() / w.grad.norm() < 3e-3
