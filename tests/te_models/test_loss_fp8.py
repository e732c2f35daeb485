"""FP8 LM head: casts, loss and gradients, self-test, and whole runs."""

import json

import pytest
import torch
import torch.nn.functional as F
from fp8_suite.core.errors import EXIT_BAD_SETTING
from fp8_suite.te_models.kernels import loss_fp8
from fp8_suite.te_models.kernels.loss import softmax_cross_entropy
from fp8_suite.te_models.kernels.loss_fp8 import E4M3, E5M2

from tests.training.test_run import curve, train

SHORT = "--mixed_precision fp8 --max_steps 2 --eval_interval 0 --no_save_checkpoints --no_export"


def case(tokens=100, hidden=32, vocab=48):
    torch.manual_seed(0)
    h = (torch.randn(tokens, hidden) * 3).bfloat16().requires_grad_()
    w = torch.randn(vocab, hidden).bfloat16().requires_grad_()
    labels = torch.randint(0, vocab, (tokens,))
    labels[::3] = -100
    return h, w, labels


def dequantized(matrix):
    quantized = loss_fp8.cast(matrix.detach())
    return quantized.rows.float() * quantized.inverse


def cast_gradients(logits, labels):
    """Return gradients of logits in E5M2 with zeros at labels, and the exact gradients at labels."""
    scores, at = logits.float().requires_grad_(), labels.clamp(min=0)[:, None]
    F.cross_entropy(scores, labels, ignore_index=-100, reduction="sum").backward()
    at_label = torch.where(labels != -100, scores.grad.gather(1, at)[:, 0], 0.0)
    grads = (scores.grad * loss_fp8.GRADIENT_SCALE).to(E5M2).float() / loss_fp8.GRADIENT_SCALE
    return grads.scatter(1, at, 0.0), at_label


def test_a_cast_maps_the_amax_to_the_formats_maximum():
    x = torch.tensor([[0.5, -2.0, 0.25, 1.0]] * 4).bfloat16()
    quantized = loss_fp8.cast(x)
    assert quantized.rows.dtype == E4M3 and quantized.rows.float().abs().max() == 448.0
    assert torch.equal(dequantized(x), x.float())  # the values are exact in E4M3
    assert torch.equal(quantized.columns.float(), quantized.rows.float().T)
    assert loss_fp8.cast(x, columns=False).columns is None
    zeros, tiny = (loss_fp8.cast(torch.full((4, 4), value).bfloat16()) for value in (0.0, 1e-38))
    assert not zeros.rows.float().any() and zeros.inverse == 1
    assert tiny.rows.float().isfinite().all() and tiny.inverse > 0
    assert loss_fp8.cast(torch.full((4, 4), float("nan")).bfloat16()).rows.float().isnan().all()


def test_gradients_of_logits_are_cast_in_both_layouts_with_zeros_at_labels():
    _, _, labels = case(16)
    logits = (torch.randn(16, 48) * 4).bfloat16()
    columns = torch.zeros(48, 32, dtype=torch.uint8).view(E5M2)
    log_sum = softmax_cross_entropy(logits, labels)[2]
    rows, at_label = loss_fp8.cast_gradient(logits, labels, log_sum, columns, 16)
    expected, exact = cast_gradients(logits, labels)
    assert torch.equal(rows.float(), expected * loss_fp8.GRADIENT_SCALE)
    assert torch.equal(columns.float()[:, 16:], rows.float().T) and not columns.float()[:, :16].any()
    torch.testing.assert_close(at_label, -expected.sum(1))
    assert (at_label - exact).abs().max() < 0.05 and not at_label[::3].any()


@pytest.mark.parametrize(("tokens", "chunk", "per_gemm"), [(304, 2**30, 8192), (300, 1, 8192), (300, 1, 128)])
def test_loss_and_gradients_match_torch_on_the_cast_operands(tokens, chunk, per_gemm, monkeypatch):
    monkeypatch.setattr(loss_fp8, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(loss_fp8, "TOKENS_PER_GEMM", per_gemm)
    monkeypatch.setattr(loss_fp8, "VOCABULARY_PER_SUM", 32)
    h, w, labels = case(tokens)
    out = loss_fp8.linear_cross_entropy_fp8(h, w, labels)
    (out.loss / 7).backward()
    x, v = dequantized(h), dequantized(w)
    logits = (x @ v.T).bfloat16().float()
    torch.testing.assert_close(out.loss, F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
    assert out.correct == ((logits.argmax(-1) == labels) & (labels != -100)).sum()
    grad, _ = cast_gradients(logits, labels)
    by_label = torch.zeros_like(grad).scatter(1, labels.clamp(min=0)[:, None], -grad.sum(1, keepdim=True))
    by_hidden = grad @ v + by_label @ w.detach().float()
    by_weight = grad.T @ x + by_label.T @ h.detach().float()
    torch.testing.assert_close(h.grad, (by_hidden / 7).bfloat16(), rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(w.grad, (by_weight / 7).bfloat16(), rtol=2e-2, atol=1e-2)
    with torch.no_grad():
        evaluated = loss_fp8.linear_cross_entropy_fp8(h, w, labels)
    assert not evaluated.loss.requires_grad and torch.equal(evaluated.loss, out.loss.detach())


def test_a_tokens_gradients_nearly_sum_to_zero_despite_the_casts():
    """A biased sum would move all logits in the same direction in every step, without an effect on the loss.

    The hidden states have a nonzero mean, so biases add up in the weight gradient; labels are random.
    """
    h, w, labels = case(2000)
    h, w = (h.detach().float() / 6 + 1).bfloat16(), (w.detach() / 8).requires_grad_()
    loss_fp8.linear_cross_entropy_fp8(h, w, labels).loss.backward()
    x = dequantized(h)
    grads, at_label = cast_gradients((x @ dequantized(w).T).bfloat16().float(), labels)
    at_label = (at_label * loss_fp8.GRADIENT_SCALE).to(E5M2).float() / loss_fp8.GRADIENT_SCALE
    with_labels_cast = grads.scatter(1, labels.clamp(min=0)[:, None], at_label[:, None]).T @ x
    assert w.grad.float().sum(0).norm() < with_labels_cast.sum(0).norm() / 5


@pytest.mark.parametrize("part", ["loss", "gradient of hidden states", "gradient of the weight"])
def test_the_self_test_names_what_differs(part, monkeypatch):
    """The CPU stands for the GPU, which is tested first."""
    assert loss_fp8.self_test("cpu") is None
    run, errors = loss_fp8._loss_and_gradients, iter((0.1, 0.0))

    def run_with_error(*inputs):
        results = run(*inputs)
        return results | {part: results[part] * (1 + next(errors))}

    monkeypatch.setattr(loss_fp8, "_loss_and_gradients", run_with_error)
    assert loss_fp8.self_test("cpu") == f"the {part} differs from the reference"


@pytest.mark.parametrize("flags", ["--use_te", "--model_name tiny-qwen2"], ids=["te", "hf-tied"])
def test_a_run_records_the_fp8_head_and_has_nearly_the_same_losses(tmp_path, flags):
    train(tmp_path / "plain", f"{SHORT} {flags}")
    train(tmp_path / "head", f"{SHORT} {flags} --fp8_lm_head")
    rows = json.loads((tmp_path / "head" / "env.json").read_text())["coverage"]["rows"]
    assert {row["precision"] for row in rows if "lm_head" in row["modules"]} == {"fp8 current"}
    plain, head = curve(tmp_path / "plain"), curve(tmp_path / "head")
    assert plain != head and plain == pytest.approx(head, rel=5e-3)


def test_an_fp8_head_of_more_than_one_gemm_is_refused(tmp_path, capsys):
    from transformers import GPT2Config

    GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=2048).save_pretrained(tmp_path / "gpt2")
    model = f"--model_name {tmp_path / 'gpt2'} --init random --tokenizer_name demo"
    train(tmp_path / "run", f"{SHORT} {model} --fp8_lm_head", code=EXIT_BAD_SETTING)
    assert "computes its logits with more than one GEMM; drop it" in capsys.readouterr().err
