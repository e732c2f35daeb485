"""FlashAttention 4 is taken where it runs and is right; what it computes is tests/gpu's to see."""

import os
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from te_models import packed_attention
from te_models.kernels import flash_attention
from training import kernels
from training.config import config_from_dict
from training.precision.recipes import Precision
from training.tracking.metrics import ModelShape


@pytest.fixture
def interface(monkeypatch):
    """A module in FlashAttention 4's place whose attention can be set; what it was called with is kept."""
    module = types.ModuleType(flash_attention.MODULE)
    module.calls, module.spoil = [], lambda out: out

    def attend(q, k, v, causal):
        heads = [t.float().transpose(1, 2) for t in (q, k, v)]
        out = F.scaled_dot_product_attention(*heads, is_causal=causal, enable_gqa=True).transpose(1, 2)
        return module.spoil(out.to(q.dtype)), None

    def flash_attn_func(q, k, v, *, causal, window_size, deterministic):
        module.calls.append(("rows", causal, window_size, deterministic))
        return attend(q, k, v, causal)

    def flash_attn_varlen_func(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size, deterministic
    ):
        module.calls.append(("packed", causal, window_size, deterministic))
        assert cu_seqlens_q.tolist() == cu_seqlens_k.tolist() == [0, max_seqlen_q, 2 * max_seqlen_k]
        return attend(*(t.unflatten(0, (2, -1)) for t in (q, k, v)), causal)[0].flatten(0, 1)

    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, flash_attention.MODULE, module)
    monkeypatch.setattr(flash_attention, "installed", lambda: "4.0.0b99")
    return module


def trial(**how) -> str | None:
    attend = flash_attention.as_te_calls(**{"packed": True} | how)
    return flash_attention.wrong(attend, 4, 2, 16, device="cpu")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("packed", "form"), [(True, "packed"), (False, "rows")])
def test_attention_that_is_right_is_found_so_as_te_calls_it(interface, packed, form, deterministic):
    assert trial(packed=packed, deterministic=deterministic) is None
    assert interface.calls == [(form, True, (-1, 0), deterministic)]


def test_attention_of_hugging_face_layers_is_tried_by_its_own_operator():
    assert flash_attention.wrong(packed_attention.attend_packed, 4, 2, 16, device="cpu") is None


def zeros(out):
    return 0 * out


def one_head_off(out):
    return torch.cat([out[..., :3, :], out[..., 3:, :] * 1.1], dim=-2)


def wrong_gradient(out):
    return out.detach() + 0.5 * (out - out.detach())


def not_a_number(out):
    return out * float("nan")


def gradient_not_a_number(out):
    if out.requires_grad:
        out.register_hook(lambda grad: grad * float("nan"))
    return out


@pytest.mark.parametrize("spoil", [zeros, one_head_off, wrong_gradient, not_a_number, gradient_not_a_number])
def test_attention_that_is_wrong_is_found_so(interface, spoil):
    interface.spoil = spoil
    assert "4.0.0b99 computes wrong attention" in trial() and flash_attention.INSTALL in trial()


def test_attention_that_fails_is_told_with_the_reason(interface):
    def spoil(out):
        raise RuntimeError("no such kernel\nand more")

    interface.spoil = spoil
    assert "fails (no such kernel)" in trial() and "remove its kernels in" in trial()


def test_reasons_not_to_take_it(monkeypatch):
    assert "Hopper" in flash_attention.why_not(128)  # no GPU here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert "Hopper" in flash_attention.why_not(128)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert "not installed: pip install" in flash_attention.why_not(128)
    monkeypatch.setattr(flash_attention, "installed", lambda: "4.0.0b29")
    assert "head size 100" in flash_attention.why_not(100) and "head size 264" in flash_attention.why_not(264)
    monkeypatch.setattr(flash_attention, "load_error", lambda: ImportError("no driver"))
    assert "does not load (no driver)" in flash_attention.why_not(128)
    monkeypatch.setattr(flash_attention, "load_error", lambda: None)
    assert flash_attention.why_not(128) is None


@pytest.fixture
def choose(monkeypatch, capsys):
    """What a run with these settings takes, what it says, and the switches that TE would see."""
    for name in flash_attention.TE_SWITCHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(flash_attention, "as_te_calls", lambda **how: how)
    monkeypatch.setattr(flash_attention, "load_failed", lambda: False)
    monkeypatch.setattr(kernels.rotation, "why_not", lambda *heads: None)
    monkeypatch.setattr(kernels.fused_residual, "why_not", lambda width: None)
    monkeypatch.setattr(kernels.fused_residual, "use", lambda wanted: None)
    taken_by_torch = []
    monkeypatch.setattr(packed_attention, "use_flash_attention_4", lambda: taken_by_torch.append(True))
    monkeypatch.setattr(packed_attention, "use_torch", taken_by_torch.clear)

    def decide(settings, *, backend, missing=None, wrong=None):
        tried = []
        monkeypatch.setattr(flash_attention, "why_not", lambda size: missing)
        monkeypatch.setattr(flash_attention, "wrong", lambda how, *heads: tried.append(how) or wrong)
        cfg, precision = config_from_dict(settings), Precision("bf16", "bf16", te_backend=backend)
        chosen = kernels.choose_kernels(cfg, precision, ModelShape(*[64] * 7), torch.device("cpu"))
        switches = {n for n in flash_attention.TE_SWITCHES if backend and os.environ.get(n) == "0"}
        return chosen.flash_attention, bool(taken_by_torch), switches, tried, capsys.readouterr().out

    yield decide
    flash_attention.take_back()


OTHERS_OFF, FLASH_OFF = {"NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN_V3"}, {"NVTE_FLASH_ATTN_V4"}


def test_a_run_takes_it_where_it_is_right(choose):
    forms = [{"packed": packed, "deterministic": False} for packed in (True, False)]
    assert choose({"use_te": True}, backend="native") == (True, False, OTHERS_OFF, forms, "")
    how = {"packed": False, "deterministic": True}
    settings = {"use_te": True, "packing": False, "deterministic": True}
    assert choose(settings, backend="native") == (True, False, OTHERS_OFF, [how], "")
    assert choose({}, backend=None) == (True, True, set(), [packed_attention.attend_packed], "")


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"flash_attention": False}, {}),
        ({"fp8_attention": True, "mixed_precision": "fp8"}, {}),
        ({}, {"missing": "it is not installed"}),
    ],
)
def test_te_does_not_take_by_itself_what_was_not_tried(choose, settings, options):
    found = choose({"use_te": True} | settings, backend="native", **options)
    assert found == (False, False, FLASH_OFF, [], "")
    assert choose(settings, backend=None, **options) == (False, False, set(), [], "")


def test_fp32_and_the_emulation_have_attention_of_their_own(choose):
    assert choose({"mixed_precision": "fp32"}, backend=None)[:2] == (False, False)
    assert choose({"use_te": True}, backend="emulated") == (False, False, set(), [], "")


def test_a_wrong_one_is_not_taken_and_said_to_be_wrong(choose):
    for settings, backend in (({"use_te": True}, "native"), ({}, None)):
        taken, by_torch, switches, _, said = choose(settings, backend=backend, wrong="it computes zeros")
        assert (taken, by_torch, switches) == (False, False, FLASH_OFF if backend else set())
        assert "WARNING: FlashAttention 4 is not used: it computes zeros" in said


def test_one_that_does_not_load_is_named(choose, monkeypatch):
    monkeypatch.setattr(flash_attention, "load_failed", lambda: True)
    assert "not used: no compiler" in choose({"use_te": True}, backend="native", missing="no compiler")[-1]


def test_all_ranks_take_it_or_none(choose, monkeypatch):
    def with_another_rank(work):
        return [work(), (False, "its cache is locked")]

    monkeypatch.setattr(kernels.ranks, "together", with_another_rank)
    taken, _, switches, _, said = choose({"use_te": True}, backend="native")
    assert not taken and switches == FLASH_OFF and "its cache is locked" in said


def test_tes_own_switches_are_the_users_and_one_run_does_not_decide_the_next(choose, monkeypatch):
    assert choose({"use_te": True}, backend="native")[0]
    assert choose({"use_te": True, "flash_attention": False}, backend="native")[2] == FLASH_OFF
    assert choose({"use_te": True}, backend="native")[2] == OTHERS_OFF
    flash_attention.take_back()
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    assert choose({"use_te": True}, backend="native") == (False, False, {"NVTE_FLASH_ATTN"}, [], "")
