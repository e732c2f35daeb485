"""Emulation against Transformer Engine: casts bit for bit, layers, scaling state and losses."""

import pytest
import torch
from fp8_suite.te_models.backend import te_module
from fp8_suite.te_models.decoder import layer_settings, rope_angles
from fp8_suite.te_models.emulation.casts import E4M3, E5M2, amax_of, cast_blocks, cast_tensor, cast_with_scale
from fp8_suite.training.precision.recipes import Precision, build_autocast, make_recipe, why_not
from fp8_suite.training.precision.scaling import restore_scaling, scaling_state
from fp8_suite.training.precision.settings import PrecisionConfig

from tests.gpu.models import DEVICE, batch, build, spec

pytestmark = pytest.mark.gpu
BACKENDS = ("native", "emulated")
RECIPES = ["bf16", "delayed", "current", "block", "block, FP32 scales"]  # MXFP8 needs Blackwell
HIDDEN, FFN, HEADS, GROUPS, TOKENS = 512, 1024, 8, 2, 2048


def recipe_of(name: str, backend: str):
    if name == "bf16":
        return None
    name, _, scales = name.partition(", ")
    if reason := why_not(name):
        pytest.skip(reason)
    return make_recipe(name, PrecisionConfig(fp8_amax_history_len=4, fp8_fp32_scales=bool(scales)), backend)


def within(backend: str, recipe):
    """FP8 autocast, disabled for BF16; without a recipe TE would build its default one."""
    return te_module(backend).autocast(
        enabled=recipe is not None, recipe=recipe or recipe_of("current", backend)
    )


def error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    return ((actual.float() - reference.float()).norm() / reference.float().norm()).item()


def values(*shape: int, dtype=torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Normal values whose magnitudes differ by row and column, with an outlier and a block of zeros."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(*shape, device=DEVICE, generator=generator)
    x *= 2.0 ** torch.randint(-8, 9, (shape[0], 1), device=DEVICE, generator=generator)
    x *= 2.0 ** torch.randint(-8, 9, (1, shape[1]), device=DEVICE, generator=generator)
    x[:128, 128:256] = 0.0
    x[200, 300] = 3e4
    return x.to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.fixture
def te():
    return te_module("native")


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_per_tensor_casts_match_te_bit_for_bit(te, dtype, source):
    x = values(256, 512, dtype=source)
    te_dtype = {E4M3: te.DType.kFloat8E4M3, E5M2: te.DType.kFloat8E5M2}[dtype]
    current = te.Float8CurrentScalingQuantizer(te_dtype, device=DEVICE)(x)
    emulated = cast_tensor(x, dtype)
    assert torch.equal(bits(emulated.data), current._data) and emulated.scale_inv == current._scale_inv
    scale, amax = torch.tensor([3.7], device=DEVICE), torch.zeros(1, device=DEVICE)
    delayed = te.Float8Quantizer(scale, amax, te_dtype)(x)
    emulated = cast_with_scale(x, scale[0], dtype)  # 3.7 times the outlier saturates
    assert torch.equal(bits(emulated.data), delayed._data) and emulated.scale_inv == delayed._scale_inv
    assert amax == amax_of(x)


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("sides", [1, 2], ids=["1x128", "128x128"])
@pytest.mark.parametrize("power_of_two", [True, False], ids=["powers of two", "fp32"])
def test_block_casts_match_te_bit_for_bit(te, power_of_two, sides, source):
    if reason := why_not("block"):
        pytest.skip(reason)
    rows, columns = 384, 640
    x = values(rows, columns, dtype=source)
    native = te.Float8BlockQuantizer(
        te.DType.kFloat8E4M3,
        rowwise=True,
        columnwise=True,
        block_scaling_dim=sides,
        force_pow_2_scales=power_of_two,
    )(x)
    along = cast_blocks(x, E4M3, (1, 128) if sides == 1 else (128, 128), power_of_two=power_of_two)
    across = cast_blocks(x, E4M3, (128, 1) if sides == 1 else (128, 128), power_of_two=power_of_two)
    assert torch.equal(bits(along.data), native._rowwise_data)
    assert torch.equal(bits(across.data.T), native._columnwise_data)
    # TE pads scales for its GEMMs and stores the scales of 1x128 blocks transposed.
    row_scales, column_scales = native._rowwise_scale_inv, native._columnwise_scale_inv
    if sides == 1:
        assert torch.equal(along.scale_inv.T, row_scales[: columns // 128, :rows])
        assert torch.equal(across.scale_inv, column_scales[: rows // 128, :columns])
    else:
        assert torch.equal(along.scale_inv, row_scales[: rows // 128, : columns // 128])
        assert torch.equal(along.scale_inv.T, column_scales[: columns // 128, : rows // 128])


def gradients(module, x, call, backend, recipe, steps: int) -> dict[str, torch.Tensor]:
    """Output and gradients of the last step; steps use the same tokens scaled up and down."""
    for step in range(steps):
        module.zero_grad(set_to_none=True)
        inputs = (x * 2.0 ** (step % 3 - 1)).detach().requires_grad_()
        with within(backend, recipe):
            y = module(inputs, **call)
        y = y[0] if isinstance(y, tuple) else y
        generator = torch.Generator(DEVICE).manual_seed(step)
        direction = torch.randn(y.shape, device=DEVICE, generator=generator).bfloat16() / 16
        y.backward(direction)
    grads = {name: p.grad for name, p in module.named_parameters()}
    return {"output": y.detach(), "input": inputs.grad} | grads


def weights_of(module) -> dict[str, torch.Tensor]:
    return {k: v for k, v in module.state_dict().items() if not k.endswith("_extra_state")}


def pair(make) -> dict[str, torch.nn.Module]:
    """Build the same module with both backends and the same weights; norms are far from ones."""
    modules = {backend: make(te_module(backend), backend) for backend in BACKENDS}
    with torch.no_grad():
        for name, parameter in modules["native"].named_parameters():
            norm = name.endswith(("layer_norm_weight", "q_norm.weight", "k_norm.weight"))
            parameter.normal_(1.0 if norm else 0.0, 0.2 if norm else 0.04)
    modules["emulated"].load_state_dict(weights_of(modules["native"]))
    return modules


def common(backend: str) -> dict:
    return {"params_dtype": torch.bfloat16, "device": DEVICE}


def linear(te, backend):
    return te.Linear(HIDDEN, FFN, **({"bias": False} if backend == "native" else {}), **common(backend))


def layernorm_linear(te, backend):
    return te.LayerNormLinear(HIDDEN, FFN, normalization="RMSNorm", bias=True, **common(backend))


def mlp(te, backend):
    fixed = {"bias": False, "normalization": "RMSNorm", "activation": "swiglu"}
    return te.LayerNormMLP(HIDDEN, FFN, **(fixed if backend == "native" else {}), **common(backend))


def layer(attention: str, **options):
    def make(te, backend):
        return te.TransformerLayer(
            HIDDEN,
            FFN,
            HEADS,
            num_gqa_groups=GROUPS,
            kv_channels=HIDDEN // HEADS,
            layernorm_epsilon=1e-5,
            **layer_settings(packed=attention == "thd"),
            **options,
            **common(backend),
        )

    return make


def compare(make, name, x, call, *, steps: int) -> dict[str, float]:
    """Relative errors of the emulated module's output and gradients, by name."""
    modules = pair(make)
    results = {
        backend: gradients(module, x, call, backend, recipe_of(name, backend), steps)
        for backend, module in modules.items()
    }
    native, emulated = results["native"], results["emulated"]
    assert native.keys() == emulated.keys()
    errors = {key: error(emulated[key].view_as(native[key]), native[key]) for key in native}
    return errors | state_gap(modules)


def state_gap(modules: dict[str, torch.nn.Module]) -> dict[str, float]:
    """Largest relative difference of scales and amaxes; names, shapes and weights' state must be equal."""
    native, emulated = (scaling_state(modules[backend]) for backend in BACKENDS)
    assert {k: v.shape for k, v in native.items()} == {k: v.shape for k, v in emulated.items()}
    gaps: dict[str, float] = {}
    for name, tensor in native.items():
        part = name.rpartition(".")[2]
        assert torch.equal(emulated[name] == 0, tensor == 0), name
        if ".scaling_fwd." in name:
            assert torch.equal(emulated[name][..., 1::3], tensor[..., 1::3]), name
        gap = ((emulated[name] - tensor).abs() / tensor.abs().clamp(min=1e-30)).max().item()
        gaps[part] = max(gap, gaps.get(part, 0.0))
    return gaps


# GEMMs sum in another order, and TE's forward GEMMs of per-tensor recipes with fewer bits. The last BF16 bit
# of a sum may then differ, and with it an FP8 code in the next GEMM, by 2^-4 of the value.
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("make", [linear, layernorm_linear, mlp])
def test_linears_match_te(make, name):
    x = torch.randn(TOKENS, HIDDEN, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    errors = compare(make, name, x.bfloat16(), {}, steps=4)
    assert max(errors.values()) < (0.003 if name == "bf16" else 0.01 if make is linear else 0.03)


QK_NORM = {"qk_norm_type": "RMSNorm", "qk_norm_eps": 1e-6, "qk_norm_before_rope": True}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("attention", ["bshd", "thd"])
@pytest.mark.parametrize("options", [{}, QK_NORM], ids=["llama", "qwen3"])
def test_layers_match_te(attention, options, name):
    x = torch.randn(
        8, 256, HIDDEN, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(2)
    ).bfloat16()
    call = {"rotary_pos_emb": rope_angles(spec().config, 256).to(DEVICE)}
    if attention == "thd":
        x = x.flatten(0, 1)
        ends = torch.tensor([0, 100, 256, 290, 512, 768, 1000, 1024, 1280, 1500, 1536, 1792, 2048])
        lengths = ends.int().to(DEVICE)
        call |= {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths, "pad_between_seqs": False}
        call |= {"max_seqlen_q": 256, "max_seqlen_kv": 256}
    errors = compare(layer(attention, **options), name, x, call, steps=4)
    assert max(errors.values()) < (0.01 if name == "bf16" else 0.1)


@pytest.mark.parametrize("length", [1, 3])
def test_delayed_scaling_state_of_a_linear_matches_te_exactly(length):
    """Both backends get the same operands; some steps have amaxes of 0 and infinity."""
    cfg = PrecisionConfig(fp8_amax_history_len=length)
    modules = pair(linear)
    x = torch.randn(256, HIDDEN, device=DEVICE).bfloat16()
    for step, factor in enumerate([1.0, 32.0, 0.0, 0.25, float("inf"), 1e-30, 2.0, 2.0]):
        for backend, module in modules.items():
            inputs = (x * factor).nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf"))
            with within(backend, make_recipe("delayed", cfg, backend)):
                y = module(inputs.requires_grad_())
            y.backward(torch.full_like(y, 2.0**-step))
        native, emulated = (scaling_state(modules[backend]) for backend in BACKENDS)
        assert native.keys() == emulated.keys()
        for name, tensor in native.items():
            assert torch.equal(emulated[name], tensor), (step, name, emulated[name], tensor)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_updates_scaling_state_as_in_te(reentrant):
    modules = pair(layer("bshd"))
    call = {"rotary_pos_emb": rope_angles(spec().config, 128).to(DEVICE), "use_reentrant": reentrant}
    for step in range(4):
        x = torch.randn(2, 128, HIDDEN, device=DEVICE).bfloat16() * 2.0**step
        for backend, module in modules.items():
            recipe = recipe_of("delayed", backend)
            with within(backend, recipe):
                y = te_module(backend).checkpoint(module, x.clone().requires_grad_(), **call)
            y.float().square().mean().backward()
    gaps = state_gap(modules)
    assert max(gaps.values()) < 0.1


def test_backends_load_each_others_checkpoints():
    """Compare names, order, shapes and values of weights, and the state of delayed scaling."""
    models = {b: build(spec(layers=2), use_te=True, packed=True, backend=b) for b in BACKENDS}
    native, emulated = (list(weights_of(models[b]).items()) for b in BACKENDS)
    assert [name for name, _ in native] == [name for name, _ in emulated]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(native, emulated, strict=True))
    inputs = batch([[100, 156]] * 8, packed=True)
    for backend, model in models.items():
        with within(backend, recipe_of("delayed", backend)):
            model(**inputs).loss.backward()
    saved = {name: tensor.clone() for name, tensor in scaling_state(models["native"]).items()}
    restore_scaling(models["emulated"], saved)
    assert all(torch.equal(t, saved[name]) for name, t in scaling_state(models["emulated"]).items())


def curve(backend: str, name: str, batches: list[dict], steps: int) -> torch.Tensor:
    """Losses [steps] of a small model with FP32 weights."""
    model = build(spec(layers=2), use_te=True, packed=True, backend=backend, dtype=torch.float32)
    precision = Precision(name, name, te_recipe=recipe_of(name, backend), te_backend=backend)
    autocast = build_autocast(precision, device=DEVICE, parameter_dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
    losses = []
    for step in range(steps):
        inputs = batches[step % len(batches)]
        with autocast():
            loss = model(**inputs).loss
        loss = loss / (inputs["labels"] != -100).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


@pytest.mark.parametrize("name", RECIPES)
def test_losses_match_te(name):
    """Train 100 steps on four batches; the loss falls far below ln(2048) = 7.6."""
    recipe_of(name, "native")
    batches = [batch([[100, 156]] * 8, packed=True, seed=seed) for seed in range(4)]
    native, emulated = (curve(backend, name, batches, 100) for backend in BACKENDS)
    gap = (emulated - native).abs()
    assert native[-10:].mean() < native[0] - 1
    assert gap[0] < 0.01 and gap.mean() < 0.03
