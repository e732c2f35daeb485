"""The LM head in FP8: its casts, that it computes what they leave, whole runs with it, its refusals."""

import json
import shlex
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from core.errors import EXIT_BAD_SETTING, EXIT_FAILED
from te_models import loss_fp8
from te_models.loss import linear_cross_entropy
from te_models.loss_fp8 import E4M3, E5M2, GRADIENT_SCALE, cast, cast_gradient, softmax_cross_entropy
from training.precision import recipes as precision
from training.run import main

SMALL = (
    "--num_of_samples 60 --max_seq_length 128 --batch_size 2 --eval_samples 6 --num_workers 0 --num_proc 1 "
    "--learning_rate 1e-3 --log_interval 1 --eval_interval 0 --max_steps 4 --no_save_checkpoints --no_export"
)


def case(tokens=100, hidden=32, vocab=48, seed=0):
    torch.manual_seed(seed)
    h = (torch.randn(tokens, hidden) * 3).bfloat16().requires_grad_()
    w = torch.randn(vocab, hidden).bfloat16().requires_grad_()
    labels = torch.randint(0, vocab, (tokens,))
    labels[::3] = -100
    return h, w, labels


def test_a_cast_takes_the_largest_value_to_the_formats_largest():
    x = torch.tensor([[0.5, -2.0, 0.25, 1.0]] * 4).bfloat16()
    found = cast(x)
    assert found.rows.dtype == E4M3 and found.rows.float().abs().max() == 448.0
    assert torch.equal(found.rows.float() * found.inverse, x.float())  # powers of two of the largest
    assert torch.equal(found.columns.float(), found.rows.float().T)
    zeros = cast(torch.zeros(4, 4, dtype=torch.bfloat16))
    assert not zeros.rows.float().any() and zeros.inverse == 1
    assert cast(torch.full((4, 4), float("nan")).bfloat16()).rows.float().isnan().all()
    tiny = cast(torch.full((4, 4), 1e-38).bfloat16())
    assert tiny.rows.float().isfinite().all() and tiny.inverse > 0
    assert cast(x, columns=False).columns is None


def test_the_gradient_of_logits_is_cast_as_it_is_and_transposed():
    _, _, labels = case(16)
    logits = (torch.randn(16, 48) * 4).bfloat16()
    _, _, log_sum = softmax_cross_entropy(logits, labels)
    columns = torch.zeros(48, 32, dtype=torch.uint8).view(E5M2)
    rows, at_label = cast_gradient(logits, labels, log_sum, columns, 16)
    expected, exact = gradients(logits, labels)
    assert torch.equal(rows.float(), expected * GRADIENT_SCALE)
    assert torch.equal(columns.float()[:, 16:], rows.float().T) and not columns.float()[:, :16].any()
    torch.testing.assert_close(at_label, -expected.sum(1))
    assert (at_label - exact).abs().max() < 0.05 and not at_label[::3].any()


def gradients(logits, labels):
    """By logits, in E5M2 with a zero at the label; and by the label's own."""
    scores, valid = logits.float().requires_grad_(), labels != -100
    F.cross_entropy(scores, labels, ignore_index=-100, reduction="sum").backward()
    exact = torch.where(valid, scores.grad.gather(1, labels.clamp(min=0)[:, None])[:, 0], 0.0)
    cast = (scores.grad * GRADIENT_SCALE).to(E5M2).float() / GRADIENT_SCALE
    return cast.scatter(1, labels.clamp(min=0)[:, None], 0.0), exact


def test_a_token_s_gradients_nearly_add_up_to_zero_though_they_are_cast():
    """Else all logits would move the same way with every step, of which no loss knows. Hidden states with a
    mean, which is what would be added up, and labels that the model does not know.
    """
    h, w, labels = case(2000)
    h = (h.detach().float() / 6 + 1).bfloat16().requires_grad_()
    w = (w.detach() / 8).requires_grad_()
    linear_cross_entropy(h, w, labels, fp8=True).loss.backward()
    x, v = (found.rows.float() * found.inverse for found in (cast(h.detach()), cast(w.detach())))
    grads, at_label = gradients((x @ v.T).bfloat16().float(), labels)
    at_label = (at_label * GRADIENT_SCALE).to(E5M2).float() / GRADIENT_SCALE
    with_labels_cast = grads.scatter(1, labels.clamp(min=0)[:, None], at_label[:, None]).T @ x
    assert w.grad.float().sum(0).norm() < with_labels_cast.sum(0).norm() / 5


@pytest.mark.parametrize("tokens_of_a_gemm", [8192, 128], ids=["one-gemm", "several"])
@pytest.mark.parametrize("chunk_bytes", [2**30, 1], ids=["one-chunk", "many-chunks"])
@pytest.mark.parametrize("tokens", [300, 304])
def test_it_is_the_plain_formula_of_what_the_casts_leave(tokens, chunk_bytes, tokens_of_a_gemm, monkeypatch):
    monkeypatch.setattr(loss_fp8, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(loss_fp8, "TOKENS_OF_A_GEMM", tokens_of_a_gemm)
    monkeypatch.setattr(loss_fp8, "VOCABULARY_OF_A_SUM", 32)
    h, w, labels = case(tokens)
    out = linear_cross_entropy(h, w, labels, fp8=True)
    (out.loss / 7).backward()
    x, v = (found.rows.float() * found.inverse for found in (cast(h.detach()), cast(w.detach())))
    logits = (x @ v.T).bfloat16().float()
    torch.testing.assert_close(out.loss, F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
    assert out.correct == ((logits.argmax(-1) == labels) & (labels != -100)).sum()
    grad, _ = gradients(logits, labels)
    by_label = torch.zeros_like(grad).scatter(1, labels.clamp(min=0)[:, None], -grad.sum(1, keepdim=True))
    by_hidden = grad @ v + by_label @ w.detach().float()
    by_weight = grad.T @ x + by_label.T @ h.detach().float()
    torch.testing.assert_close(h.grad, (by_hidden / 7).bfloat16(), rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(w.grad, (by_weight / 7).bfloat16(), rtol=2e-2, atol=1e-2)


def test_it_is_close_to_bf16():
    h, w, labels = case()
    out = linear_cross_entropy(h, w, labels, fp8=True)
    out.loss.backward()
    found, h.grad, w.grad = (h.grad, w.grad), None, None
    exact = linear_cross_entropy(h, w, labels)
    exact.loss.backward()
    assert out.loss.item() == pytest.approx(exact.loss.item(), rel=0.02) and out.loss != exact.loss
    for mine, grad in zip(found, (h.grad, w.grad), strict=True):
        assert 0.005 < (mine - grad).norm() / grad.norm() < 0.1


def test_no_gradient_is_computed_under_no_grad():
    h, w, labels = case()
    with torch.no_grad():
        out = linear_cross_entropy(h, w, labels, fp8=True)
    assert not out.loss.requires_grad
    torch.testing.assert_close(out.loss, linear_cross_entropy(h, w, labels, fp8=True).loss.detach())


def train(folder: Path, flags: str) -> int:
    argv = [*shlex.split(SMALL), "--output_dir", str(folder), *shlex.split(flags)]
    return main(argv, description="test", start=lambda cfg: torch.device("cpu"))


def logged(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.mark.parametrize("flags", ["--use_te", "", "--use_te --model_name tiny-qwen2"])
def test_a_run_with_it_says_so_and_learns_alike(tmp_path, flags):
    """tiny-qwen2's head is tied to its embedding."""
    assert train(tmp_path / "plain", f"{flags} --mixed_precision fp8") == 0
    assert train(tmp_path / "head", f"{flags} --mixed_precision fp8 --fp8_lm_head") == 0
    rows = json.loads((tmp_path / "head" / "env.json").read_text())["coverage"]["rows"]
    assert {row["precision"] for row in rows if "lm_head" in row["modules"]} == {"fp8 current"}
    plain, head = logged(tmp_path / "plain"), logged(tmp_path / "head")
    assert plain != head and plain == pytest.approx(head, rel=5e-3)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            "--mixed_precision bf16",
            "--fp8_lm_head: this run is in bf16; drop it, or add --mixed_precision fp8",
        ),
        ("--mixed_precision fp8 --model_name {odd}", "vocabulary 2050 not a multiple of 16"),
        ("--mixed_precision fp8 --model_name {gpt2}", "does more to its logits than one GEMM; drop it"),
    ],
)
def test_where_it_cannot_run_it_is_refused(tmp_path, flags, reason, capsys):
    from transformers import GPT2Config, LlamaConfig

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    LlamaConfig(vocab_size=2050, **sizes).save_pretrained(tmp_path / "odd")
    GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=2048).save_pretrained(tmp_path / "gpt2")
    flags = flags.format(odd=tmp_path / "odd", gpt2=tmp_path / "gpt2")
    code = train(tmp_path / "run", f"{flags} --init random --tokenizer_name demo --fp8_lm_head")
    error = capsys.readouterr().err
    assert code == EXIT_BAD_SETTING and reason in error and error.count("\n") == 1


def test_a_run_whose_layers_do_not_run_in_fp8_stops_all_the_same(tmp_path, capsys, monkeypatch):
    real, bf16 = precision.build_autocast, precision.Precision("bf16", "bf16")
    monkeypatch.setattr(precision, "build_autocast", lambda _, **settings: real(bf16, **settings))
    assert train(tmp_path / "run", "--use_te --mixed_precision fp8 --fp8_lm_head") == EXIT_FAILED
    assert "no module ran in FP8 in the first step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("cast", "it computes another cast"),
        ("cast_gradient", "it computes another gradient of logits"),
        ("add_label_rows_", "it computes another part of labels in the hidden states' gradient"),
        ("add_to_label_rows_", "it computes another part of labels in the weight's gradient"),
        ("multiply", "it computes another GEMM"),
    ],
)
def test_what_is_computed_otherwise_than_on_the_cpu_is_found(name, says, monkeypatch):
    assert loss_fp8.why_not("cpu") is None
    computed, calls = getattr(loss_fp8, name), []

    def changed(*given, **how):
        calls.append(name)
        result = computed(*given, **how)
        if len(calls) <= {"multiply": 2}.get(name, 1):  # the CPU's own
            return result
        if name == "multiply":
            return result * 1.02
        if name.startswith("add"):
            return given[0].add_(0.1)
        rows = result.rows if name == "cast" else result[0]
        rows.view(torch.uint8)[5:7] ^= 0x14
        return result

    monkeypatch.setattr(loss_fp8, name, changed)
    assert loss_fp8.why_not("cpu") == says


def test_a_kernel_that_adds_up_some_tokens_of_a_label_is_found(monkeypatch):
    def first_sixteen(grad_weight, hidden, labels, at_label):
        left = torch.stack([(labels[:i] == label).sum() for i, label in enumerate(labels)]) < 16
        computed(grad_weight, hidden, labels, at_label.where(left, 0.0))

    calls, computed = [], loss_fp8.add_to_label_rows_
    monkeypatch.setattr(
        loss_fp8,
        "add_to_label_rows_",
        lambda *given: (calls.append(1), (computed if len(calls) == 1 else first_sixteen)(*given)),
    )
    assert "part of labels in the weight's gradient" in loss_fp8.why_not("cpu")
