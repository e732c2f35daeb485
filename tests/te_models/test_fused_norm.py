"""Which norms the kernel that casts takes, and where it is put, on stand-ins for TE."""

import sys
from types import SimpleNamespace

import pytest
import torch

from te_models.kernels import fused_norm

WIDTH = 16


class Float8Quantizer:
    def __init__(self, rowwise=True):
        self.rowwise_usage = rowwise


@pytest.fixture
def te(monkeypatch):
    """TE's module of functions, and the one that looks norms up in it; on Hopper."""
    functions = SimpleNamespace(rmsnorm_fwd=lambda *given, **named: ("TE's", given, named))
    common = SimpleNamespace(_get_normalization_func=lambda norm, forward: functions.rmsnorm_fwd)
    tensors = SimpleNamespace(Float8Quantizer=Float8Quantizer)
    found = {"cpp_extensions": functions, "module._common": common, "tensor.float8_tensor": tensors}
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, f"transformer_engine.pytorch.{name}", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(fused_norm, "_run", lambda *given: ("the kernel's", given))
    monkeypatch.setattr(fused_norm, "_wrong", lambda width: None)
    return SimpleNamespace(functions=functions, common=common)


def call(te, *, tokens=8, **other):
    given = {
        "x": torch.zeros(tokens, WIDTH, dtype=torch.bfloat16),
        "weight": torch.zeros(WIDTH, dtype=torch.bfloat16),
        "eps": 1e-5,
        "out": None,
        "quantizer": Float8Quantizer(),
        "dtype": SimpleNamespace(name="kBFloat16"),
        "sm_margin": 0,
        "zero_centered": False,
    } | other
    return list(given.values()), te.functions.rmsnorm_fwd(*given.values())


def test_the_kernel_is_put_in_place_and_taken_out_again(te):
    plain = te.functions.rmsnorm_fwd
    for wanted, name in ((True, "the kernel's"), (True, "the kernel's"), (False, "TE's"), (False, "TE's")):
        fused_norm.use(wanted)
        assert fused_norm.why_not(WIDTH) is None
        assert call(te)[1][0] == name
    assert te.functions.rmsnorm_fwd is plain
    fused_norm.use(True)
    (x, weight, eps, _, quantizer, *_), (_, taken) = call(te)
    assert taken == (x, weight, eps, quantizer)


class OtherQuantizer(Float8Quantizer):
    pass


@pytest.mark.parametrize(
    "other",
    [
        {"quantizer": None},
        {"quantizer": OtherQuantizer()},
        {"quantizer": Float8Quantizer(rowwise=False)},
        {"tokens": 6},
        {"tokens": 0},
        {"x": torch.zeros(8, WIDTH)},
        {"x": torch.zeros(WIDTH, 8, dtype=torch.bfloat16).T},
        {"weight": torch.zeros(WIDTH)},
        {"weight": torch.zeros(2 * WIDTH, dtype=torch.bfloat16)[::2]},
        {"out": torch.zeros(8, WIDTH)},
        {"dtype": SimpleNamespace(name="kFloat32")},
        {"sm_margin": 8},
        {"zero_centered": True},
    ],
    ids=lambda other: next(iter(other)),
)
def test_all_else_is_tes(other, te):
    fused_norm.use(True)
    given, found = call(te, **other)
    assert found == ("TE's", tuple(given), {})


def test_a_te_that_looks_norms_up_elsewhere_keeps_its_own(te):
    fixed = te.functions.rmsnorm_fwd
    te.common._get_normalization_func = lambda norm, forward: fixed
    assert fused_norm.why_not(WIDTH) == "this Transformer Engine looks norms up elsewhere"
    del te.common._get_normalization_func
    assert "looks norms up otherwise" in fused_norm.why_not(WIDTH)
    assert te.functions.rmsnorm_fwd is fixed
    del te.functions.rmsnorm_fwd
    assert fused_norm.why_not(WIDTH) == "this Transformer Engine has no place for it"


def test_other_gpus_keep_tes(te, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    monkeypatch.setattr(fused_norm, "_wrong", lambda width: "not asked")
    plain = te.functions.rmsnorm_fwd
    fused_norm.use(True)
    assert fused_norm.why_not(WIDTH) is None and te.functions.rmsnorm_fwd is plain
