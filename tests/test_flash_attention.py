"""FlashAttention 4 is taken where it runs and is right; what it computes is tests/gpu's to see."""

import os
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from training import flash_attention, run
from training.config import config_from_dict
from training.metrics import ModelShape
from training.precision import Precision


@pytest.fixture
def interface(monkeypatch):
    """A module in FlashAttention 4's place whose attention can be set; what it was called with is kept."""
    module = types.ModuleType(flash_attention.MODULE)
    module.calls, module.spoil = [], lambda out: out

    def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, causal, window_size, **others):
        module.calls.append((causal, window_size))
        lengths = cu_seqlens_q.diff().tolist()
        parts = zip(*(t.float().split(lengths) for t in (q, k, v)), strict=True)
        heads = [[t.transpose(0, 1)[None] for t in part] for part in parts]
        out = [F.scaled_dot_product_attention(*part, is_causal=causal, enable_gqa=True) for part in heads]
        joined = torch.cat([part[0].transpose(0, 1) for part in out]).to(q.dtype)
        return module.spoil(joined), None

    module.flash_attn_varlen_func = flash_attn_varlen_func
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, flash_attention.MODULE, module)
    monkeypatch.setattr(flash_attention, "installed", lambda: "4.0.0b99")
    return module


def trial() -> str | None:
    return flash_attention.wrong_in_te(4, 2, 16, device="cpu")


def test_attention_that_is_right_is_found_so_as_te_calls_it(interface):
    assert trial() is None
    assert interface.calls == [(True, (-1, 0))]


def zeros(out):
    return 0 * out


def one_head_off(out):
    return torch.cat([out[:, :3], out[:, 3:] * 1.1], dim=1)


def wrong_gradient(out):
    return out.detach() + 0.5 * (out - out.detach())


def not_a_number(out):
    return out * float("nan")


@pytest.mark.parametrize("spoil", [zeros, one_head_off, wrong_gradient, not_a_number])
def test_attention_that_is_wrong_is_found_so(interface, spoil):
    interface.spoil = spoil
    assert "4.0.0b99 computes wrong attention" in trial() and flash_attention.INSTALL in trial()


def test_attention_that_fails_is_told_with_the_reason(interface):
    def spoil(out):
        raise RuntimeError("no such kernel\nand more")

    interface.spoil = spoil
    assert "fails as Transformer Engine calls it (no such kernel)" in trial()


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
def takes(monkeypatch, capsys):
    """Whether a run with these settings takes it, what it says, and the switches that TE would see."""
    for name in flash_attention.TE_SWITCHES:
        monkeypatch.delenv(name, raising=False)

    def decide(settings, *, backend, missing=None, wrong=None, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(flash_attention, "why_not", lambda size: missing)
        monkeypatch.setattr(flash_attention, "wrong_in_te", lambda *heads: wrong)
        one = run.Run.__new__(run.Run)
        one.cfg, one.shape = config_from_dict(settings), ModelShape(*[64] * 7)
        one.precision = Precision("bf16", "bf16", te_backend=backend)
        taken = one._takes_flash_attention()
        switches = {n: os.environ[n] for n in flash_attention.TE_SWITCHES if n in os.environ}
        for name in switches:
            monkeypatch.delenv(name)
        return taken, capsys.readouterr().out, switches

    return decide


def test_a_run_takes_it_where_it_is_right(takes):
    assert takes({"use_te": True}, backend="native") == (True, "", {"NVTE_FUSED_ATTN": "0"})
    assert takes({}, backend=None) == (True, "", {})


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"flash_attention": False}, {}),
        ({"fp8_attention": True, "mixed_precision": "fp8"}, {}),
        ({}, {"missing": "it is not installed"}),
    ],
)
def test_a_run_leaves_it_where_it_cannot_or_shall_not(takes, settings, options):
    assert takes({"use_te": True} | settings, backend="native", **options) == (False, "", {})


def test_fp32_has_attention_of_its_own(takes):
    assert takes({"mixed_precision": "fp32"}, backend=None) == (False, "", {})


def test_the_emulation_has_attention_of_its_own(takes):
    assert takes({"use_te": True}, backend="emulated") == (False, "", {})


def test_a_wrong_one_is_kept_from_te_loudly(takes):
    taken, said, switches = takes({"use_te": True}, backend="native", wrong="it computes zeros")
    assert not taken and "WARNING: FlashAttention 4 is not used: it computes zeros" in said
    assert switches == {"NVTE_FLASH_ATTN_V4": "0"}


def test_tes_own_switches_are_the_users(takes):
    found = takes({"use_te": True}, backend="native", NVTE_FUSED_ATTN="1")
    assert found == (False, "", {"NVTE_FUSED_ATTN": "1"})
