"""Fused LM head and cross entropy against the plain formula."""

import pytest
import torch
import torch.nn.functional as F

from te_models import loss as loss_module
from te_models.loss import linear_cross_entropy, logits_cross_entropy


def case(tokens=130, hidden=16, vocab=50, seed=0):
    torch.manual_seed(seed)
    h = torch.randn(tokens, hidden, requires_grad=True)
    w = torch.randn(vocab, hidden, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,))
    labels[::3] = -100
    return h, w, labels


@pytest.mark.parametrize("chunk_bytes", [2**30, 1], ids=["one-chunk", "many-chunks"])
def test_loss_gradients_and_accuracy_match_the_plain_formula(chunk_bytes, monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", chunk_bytes)
    h, w, labels = case(tokens=300)
    out = linear_cross_entropy(h, w, labels)
    (out.loss / 7).backward()
    h2, w2 = h.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    logits = h2 @ w2.T
    expected = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    (expected / 7).backward()
    torch.testing.assert_close(out.loss, expected)
    torch.testing.assert_close(h.grad, h2.grad)
    torch.testing.assert_close(w.grad, w2.grad)
    assert out.correct == ((logits.argmax(-1) == labels) & (labels != -100)).sum()


def test_no_gradient_is_computed_under_no_grad():
    h, w, labels = case()
    with torch.no_grad():
        out = linear_cross_entropy(h, w, labels)
    torch.testing.assert_close(out.loss, linear_cross_entropy(h, w, labels).loss.detach())
    assert not out.loss.requires_grad


def test_of_equal_logits_the_first_is_the_prediction():
    labels = torch.tensor([1, 2, -100])
    for write_grad in (False, True):
        logits = torch.tensor([[1.0, 5.0, 5.0, 0.0]]).repeat(3, 1)
        assert loss_module.softmax_cross_entropy_(logits, labels, write_grad=write_grad)[1] == 1


def test_a_batch_without_labels_is_zero_with_zero_gradient():
    h, w, labels = case()
    out = linear_cross_entropy(h, w, torch.full_like(labels, -100))
    out.loss.backward()
    assert out.loss == 0 and out.correct == 0 and not h.grad.any() and not w.grad.any()


def test_autocast_decides_the_projections_dtype():
    h, w, labels = case()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = linear_cross_entropy(h, w, labels).loss
    exact = linear_cross_entropy(h, w, labels).loss
    assert rough.dtype == torch.float32 and rough != exact
    torch.testing.assert_close(rough, exact, rtol=1e-2, atol=0)
    rough.backward()
    assert h.grad.dtype == w.grad.dtype == torch.float32


def test_extreme_logits_stay_finite():
    h = torch.full((4, 2), 300.0)
    w = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    assert linear_cross_entropy(h, w, torch.tensor([0, 1, -100, 0])).loss.item() == pytest.approx(1200.0)


def test_full_logits_give_the_same_sums():
    h, w, labels = case()
    fused, full = linear_cross_entropy(h, w, labels), logits_cross_entropy(h @ w.T, labels)
    torch.testing.assert_close(fused.loss, full.loss)
    assert fused.correct == full.correct


def test_a_weight_is_trained_on_hidden_states_that_are_not():
    h, w, labels = case()
    linear_cross_entropy(h, w, labels).loss.backward()
    expected, w.grad = w.grad, None
    linear_cross_entropy(h.detach(), w, labels).loss.backward()
    assert torch.equal(w.grad, expected)


def test_softmax_is_taken_in_fp32_of_bf16_logits():
    h, w, labels = (t.detach() for t in case())
    h, w = h.bfloat16(), w.bfloat16()
    expected = F.cross_entropy((h @ w.T).float(), labels, ignore_index=-100, reduction="sum")
    for out in (linear_cross_entropy(h, w, labels), logits_cross_entropy(h @ w.T, labels)):
        assert out.loss.dtype == torch.float32
        torch.testing.assert_close(out.loss, expected)


def test_chunks_add_up_in_fp32(monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 1)
    h, w, labels = case(tokens=128 * 60)
    h, w = h.detach().bfloat16(), w.detach().bfloat16()
    exact = w.float().requires_grad_()
    linear_cross_entropy(h.float(), exact, labels).loss.backward()
    linear_cross_entropy(h, w.requires_grad_(), labels).loss.backward()
    error = (w.grad.float() - exact.grad).norm() / exact.grad.norm()
    assert error < 3e-3
