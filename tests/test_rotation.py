"""Which gradients of the joint projection are cast as they are rotated; kernels and TE are stand-ins."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from te_models import rotation
from te_models.rotation import Rotation, _SplitAndRotate, rotate_in_one_pass, rotation_table, split_and_rotate

HEADS, GROUPS, SIZE = 4, 2, 16
WIDTH = (HEADS + 2 * GROUPS) * SIZE
FLOAT8 = "transformer_engine.pytorch.tensor.float8_tensor"


class Float8Quantizer:
    scale, amax, dtype = torch.tensor(2.0), torch.zeros(1), SimpleNamespace(name="kFloat8E5M2")


class OtherQuantizer(Float8Quantizer):
    """As of current scaling, of blocks, or of TE's inspection."""


class Float8Tensor(torch.Tensor):
    """TE's, as far as asked for: it passes for BF16, and nothing may compute with it."""

    def __new__(cls, shape, dtype, *, device, **parts):
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.parts = parts
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} of the gradient")

    def view(self, *shape):
        data = self.parts["data"].view(*shape)
        return Float8Tensor(data.shape, self.dtype, device=data.device, **self.parts | {"data": data})

    def reshape(self, *shape):
        raise AssertionError("it loses the transpose")


class Projection(torch.autograd.Function):
    """TE's, which keeps what it needs of a quantizer, and `seen` of the gradient it is given."""

    @staticmethod
    def forward(ctx, joint, seen, noted):
        ctx.seen = seen
        for name, value in noted.items():
            setattr(ctx, name, value)
        return joint.clone().view(joint.shape)

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(grad)
        return torch.zeros(grad.shape, dtype=grad.dtype), None, None


def join(*given):
    """The gradient of the joint projection, from the definition."""
    *grads, table, positions = given
    joint = torch.zeros(*grads[0].shape[:-2], WIDTH, dtype=grads[0].dtype)
    flat = joint.flatten(0, -2).requires_grad_()
    with torch.enable_grad():
        parts = split_and_rotate(flat, table, positions.flatten(), GROUPS)
    (grad,) = torch.autograd.grad(parts, flat, [g.flatten(0, -3) for g in grads])
    return grad.view(joint.shape)


def join_cast(*given):
    *given, quantizer = given
    rows = join(*given).mul(quantizer.scale).to(torch.float8_e5m2).view(torch.uint8)
    return rows, rows.flatten(0, -2).T.contiguous(), 1 / quantizer.scale.view(1)


def split(joint, table, positions, groups):
    parts = split_and_rotate(joint.flatten(0, -2), table, positions.flatten(), groups)
    return tuple(part.reshape(*joint.shape[:-1], *part.shape[1:]).clone() for part in parts)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    float8 = ModuleType(FLOAT8)
    float8.Float8Quantizer, float8.Float8Tensor = Float8Quantizer, Float8Tensor
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.tensor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, FLOAT8, float8)
    kernels = ModuleType("te_models.rotation_triton")
    kernels.split, kernels.join, kernels.join_cast = split, join, join_cast
    monkeypatch.setitem(sys.modules, "te_models.rotation_triton", kernels)
    monkeypatch.setattr(rotation, "_casting", True)


def gradient(*, lead=(2, 8), dtype=torch.bfloat16, recompute=None, between=lambda joint: joint, **noted):
    """What the projection is given, beside the definition's gradient; `recompute`: reentrant or not."""
    torch.manual_seed(0)
    joint = torch.randn(*lead, WIDTH).to(dtype).requires_grad_()
    table = rotation_table(torch.randn(32, SIZE // 2).repeat(1, 2)[:, None, None, :])
    positions = torch.arange(joint.shape[:-1].numel()).view(lead)
    seen = []

    def run(joint):
        projected = between(Projection.apply(joint, seen, noted))
        return _SplitAndRotate.apply(projected, table, positions, GROUPS)

    parts = run(joint) if recompute is None else checkpoint(run, joint, use_reentrant=recompute)
    grads = [torch.randn(part.shape).to(dtype) for part in parts]
    torch.autograd.backward(parts, grads)
    (found,) = seen
    return found, join(*grads, table, positions)


DELAYED = {"grad_output_quantizer": Float8Quantizer(), "use_bias": False}


@pytest.mark.parametrize("recompute", [None, True, False], ids=["kept", "reentrant", "recomputed"])
@pytest.mark.parametrize("lead", [(2, 8), (16,)], ids=["rows", "packed"])
def test_delayed_scalings_gradient_arrives_in_fp8_and_both_layouts(lead, recompute):
    found, wanted = gradient(lead=lead, recompute=recompute, **DELAYED)
    assert isinstance(found, Float8Tensor) and found.shape == wanted.shape and found.dtype == wanted.dtype
    assert found.parts["quantizer"] is DELAYED["grad_output_quantizer"]
    matrix = found.reshape((-1, WIDTH))  # as TE begins
    assert type(matrix) is Float8Tensor and matrix.shape == (16, WIDTH)
    data, transpose = matrix.parts["data"], matrix.parts["data_transpose"]
    assert torch.equal(transpose.T, data) and transpose.is_contiguous()
    values = data.view(torch.float8_e5m2).float() * matrix.parts["fp8_scale_inv"]
    torch.testing.assert_close(values, wanted.float().view(16, WIDTH), rtol=0.13, atol=1e-4)


@pytest.mark.parametrize(
    "how",
    [
        {},  # no node of TE's
        {"grad_output_quantizer": None, "use_bias": False},  # BF16
        {"grad_output_quantizer": OtherQuantizer(), "use_bias": False},
        DELAYED | {"use_bias": True},
        {"grad_output_quantizer": Float8Quantizer()},  # another TE
        DELAYED | {"lead": (2, 9)},
        DELAYED | {"dtype": torch.float32},
        DELAYED | {"between": lambda joint: joint.view_as(joint)},
        DELAYED | {"between": lambda joint: joint * 1},
    ],
    ids=["other", "bf16", "recipe", "bias", "version", "tokens", "fp32", "view", "computed"],
)
def test_all_others_stay_as_they_are(how):
    found, wanted = gradient(**how)
    assert type(found) is torch.Tensor and torch.equal(found, wanted)


def test_it_is_hoppers_and_can_be_taken_back(monkeypatch):
    for capability, taken in (((8, 9), False), ((9, 0), True), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        rotation.cast_gradients(True)
        assert isinstance(gradient(**DELAYED)[0], Float8Tensor) == taken
        assert taken or rotation.why_not(32, 8, 128, cast=True) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    rotation.cast_gradients(False)
    assert type(gradient(**DELAYED)[0]) is torch.Tensor


def test_nothing_lies_between_a_layers_projection_and_the_split():
    seen, given = [], torch.randn(2, 8, WIDTH).bfloat16().requires_grad_()

    class Attention(torch.nn.Module):
        num_gqa_groups_per_partition, qkv_format = GROUPS, "bshd"

        def layernorm_qkv(self, hidden, is_first_microbatch):
            return Projection.apply(hidden, seen, DELAYED)

        def core_attention(self, queries, keys, values, qkv_format):
            return queries + torch.cat([keys + values] * (HEADS // GROUPS), dim=2)

        def proj(self, attended, is_first_microbatch):
            return attended

    layer = torch.nn.Module()
    layer.self_attention = Attention()
    rotate_in_one_pass(layer)
    table = rotation_table(torch.randn(32, SIZE // 2).repeat(1, 2)[:, None, None, :])
    positions = torch.arange(8).repeat(2, 1)
    layer.self_attention(given, rotary_pos_emb=Rotation(table, positions)).sum().backward()
    assert isinstance(seen[0], Float8Tensor)
