"""The gradient of the joint projection, cast as it is rotated, against TE's cast of it."""

import importlib

import pytest
import torch

from te_models import rotation
from te_models.rotation import rotation_table
from tests.gpu.models import DEVICE, batch, build, plan
from tests.gpu.test_accumulation import compare_with_single_micro_batches
from tests.gpu.test_fused_swiglu import quantizer
from tests.gpu.test_te_model import bf16, fp8, step

pytestmark = pytest.mark.gpu
PASSES = 6  # delayed scaling has found the scales of gradients by then
LAYERS = 4


@pytest.fixture(autouse=True)
def needs_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("other GPUs have TE's casts")
    yield
    rotation.cast_gradients(False)


@pytest.fixture
def taken(monkeypatch):
    """One entry for each gradient that TE's projection was given in FP8: whether it used it as it is."""
    base = importlib.import_module("transformer_engine.pytorch.module.base").TransformerEngineBaseModule
    preprocess, seen = base.grad_output_preprocess, []

    def spy(ctx, grad, *rest):
        out = preprocess(ctx, grad, *rest)
        if hasattr(grad, "_transpose"):
            same = [
                getattr(out[0], n).data_ptr() == getattr(grad, n).data_ptr() for n in ("_data", "_transpose")
            ]
            width, tokens = out[0]._transpose.shape
            same += [not out[0]._transpose_invalid, out[0]._data.shape == (tokens, width)]
            seen.append(all(same))
        return out

    monkeypatch.setattr(base, "grad_output_preprocess", staticmethod(spy))
    return seen


def parts_of(heads, groups, size, lead):
    generator = torch.Generator(DEVICE).manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, device=DEVICE, generator=generator)

    grads = [random(*lead, n, size).bfloat16() for n in (heads, groups, groups)]
    table = rotation_table(random(64, size // 2).repeat(1, 2)[:, None, None, :])
    tokens = grads[0].shape[:-2].numel()
    return grads, table, torch.randint(64, (tokens,), device=DEVICE, generator=generator).view(lead)


def assert_as_te_casts(grads, table, positions, dtype, scale):
    from te_models import rotation_triton

    mine, theirs = quantizer(dtype, scale), quantizer(dtype, scale)
    joint = rotation_triton.join(*grads, table, positions)
    wanted = theirs(joint.flatten(0, -2))
    found = rotation._join_and_cast(grads, table, positions, mine)
    assert found.shape == joint.shape and found.dtype == joint.dtype and found.device == joint.device
    found = found.reshape((-1, joint.shape[-1])).contiguous()
    for name in ("_data", "_transpose"):
        assert torch.equal(getattr(found, name).view(torch.uint8), getattr(wanted, name).view(torch.uint8))
    assert torch.equal(found._scale_inv, wanted._scale_inv) and not found._transpose_invalid
    return mine.amax, theirs.amax


@pytest.mark.parametrize("dtype", ["e5m2", "e4m3"])
@pytest.mark.parametrize("scale", [1.0, 37.3, 3e4], ids=["small", "fits", "saturates"])
@pytest.mark.parametrize("lead", [(2, 1024), (8192,), (3, 12), (4,), (1, 208)], ids=str)
@pytest.mark.parametrize("heads", [(32, 8, 128), (32, 8, 64), (24, 8, 128), (6, 2, 48), (14, 2, 64)], ids=str)
def test_bits_are_those_of_tes_cast(heads, lead, scale, dtype):
    mine, theirs = assert_as_te_casts(*parts_of(*heads, lead), dtype, scale)
    assert torch.equal(mine, theirs)


def test_what_is_not_finite_stays_so():
    from te_models import rotation_triton

    grads, table, positions = parts_of(4, 2, 64, (16,))
    grads[0][3, 1, 5], grads[2][7, 0, 40] = float("nan"), float("inf")
    joint = rotation_triton.join(*grads, table, positions)
    found = rotation._join_and_cast(grads, table, positions, quantizer("e5m2", 1.0))
    for bits in (found._data, found._transpose.T):
        assert torch.equal(bits.view(torch.float8_e5m2).isnan(), joint.isnan())
        assert bits.view(torch.float8_e5m2).float()[joint.isinf()].tolist() == [57344.0]


def test_the_largest_of_several_is_kept():
    """As over the micro-batches of a step."""
    grads, table, positions = parts_of(4, 2, 64, (16,))
    mine = quantizer("e5m2", 1.0)
    rotation._join_and_cast(grads, table, positions, mine)
    once = mine.amax.clone()
    rotation._join_and_cast([grad / 2 for grad in grads], table, positions, mine)
    assert torch.equal(mine.amax, once)
    rotation._join_and_cast([grad * 2 for grad in grads], table, positions, mine)
    assert torch.equal(mine.amax, 2 * once)


def trained(*, cast, packed, recompute, family="llama", name="delayed"):
    """Loss and gradients of the last of several passes, in which scales are found."""
    rotation.cast_gradients(cast)
    autocast = fp8(name)[1] if name else bf16()
    options = {"gradient_checkpointing": recompute is not None, "reentrant": bool(recompute)}
    model = build(plan(family=family, layers=LAYERS), use_te=True, packed=packed, **options)
    inputs = batch([[100, 156] if packed else [256]] * 8, packed=packed)
    for _ in range(PASSES):
        loss, grads = step(model, inputs, autocast)
    return loss, grads


@pytest.mark.parametrize("recompute", [None, True, False], ids=["kept", "reentrant", "recomputed"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_gradients_of_a_model_are_todays(packed, recompute, taken, monkeypatch):
    """Equal where two runs of today's way are; where attention's backward is not reproducible, as near."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    how = {"packed": packed, "recompute": recompute}
    loss, grads = trained(cast=False, **how)
    _, again = trained(cast=False, **how)
    assert not taken
    found_loss, found = trained(cast=True, **how)
    assert len(taken) == PASSES * LAYERS and all(taken)
    assert found_loss == pytest.approx(loss, rel=1e-3)
    for key, grad in grads.items():
        noise, error = (((one[key] - grad).norm() / grad.norm()).item() for one in (again, found))
        assert error <= 3 * noise, f"{key}: {error:.2e}, between two of today's {noise:.2e}"


def test_micro_batches_add_up(taken):
    rotation.cast_gradients(True)
    compare_with_single_micro_batches(plan(layers=LAYERS), "delayed")
    assert taken and all(taken)


def test_a_frozen_projection_hands_its_gradient_on(taken):
    rotation.cast_gradients(True)
    _, autocast = fp8("delayed")
    model = build(plan(layers=LAYERS), use_te=True, packed=True)
    for layer in model.layers:
        layer.self_attention.layernorm_qkv.weight.requires_grad_(False)
    inputs = batch([[100, 156]] * 8, packed=True)
    for _ in range(2):
        with autocast():
            loss = model(**inputs).loss / 1000
        loss.backward()
    assert len(taken) == 2 * LAYERS and all(taken)
    assert model.embed_tokens.weight.grad.isfinite().all() and model.embed_tokens.weight.grad.any()


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen2", "delayed"), ("qwen3", "delayed"), ("llama", "current"), ("llama", "block"), ("llama", None)],
)
def test_biases_norms_of_heads_and_other_recipes_keep_todays_way(family, name, taken, monkeypatch):
    monkeypatch.setattr(rotation, "_join_and_cast", lambda *args: pytest.fail("it was taken"))
    trained(cast=True, packed=True, recompute=None, family=family, name=name)
    assert not taken


def test_a_kernel_that_casts_wrongly_is_found(monkeypatch):
    from te_models import rotation_triton

    for heads in ((32, 8, 128), (32, 8, 64), (24, 8, 128), (14, 2, 64), (6, 2, 48)):
        assert rotation.why_not(*heads, cast=True) is None
    join_cast = rotation_triton.join_cast

    def mixed_up(*given):
        rows, columns, scale_inverse = join_cast(*given)
        columns[1] = 0
        return rows, columns, scale_inverse

    monkeypatch.setattr(rotation_triton, "join_cast", mixed_up)
    assert rotation.why_not(6, 2, 48, cast=True) == "it computes another transpose"
