"""The emulated TE layer against Hugging Face's layers, its recipes against BF16, and whole runs with it."""

import json
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from te_models import emulation as te
from te_models.decoder import rope_angles
from te_models.emulation.casts import Quantized, cast_blocks, cast_mx, cast_tensor, cast_with_scale
from te_models.weights import fuse_qkv
from tests.te_models.test_emulated_scaling import FFN, GROUPS, HEADS, HIDDEN, RECIPES, layer
from tests.training.test_run import curve as losses
from tests.training.test_run import exported, train
from training.precision.recipes import make_recipe, why_not
from training.precision.settings import PrecisionConfig

HF_LAYERS = {
    "llama": (LlamaConfig, LlamaDecoderLayer),
    "qwen2": (Qwen2Config, Qwen2DecoderLayer),
    "qwen3": (Qwen3Config, Qwen3DecoderLayer),
}
SIZE = 32  # of a head, so that heads are wider together than the hidden size
QK_NORM = {"qk_norm_type": "RMSNorm", "qk_norm_eps": 1e-6, "qk_norm_before_rope": True}


def config_of(family: str):
    config = HF_LAYERS[family][0](
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=SIZE,
        vocab_size=32,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        attn_implementation="sdpa",
    )
    config._attn_implementation = "sdpa"
    return config


def hugging_face(family: str) -> torch.nn.Module:
    """A layer in float32 whose norms and biases are far from ones and zeros."""
    torch.manual_seed(3)
    module = HF_LAYERS[family][1](config_of(family), layer_idx=0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(std=0.15)
            if "norm" in name:
                parameter.add_(1.0)
    return module


def in_tes_layout(hf: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights or their gradients, from Hugging Face's names to TE's."""
    shape = {"heads": HEADS, "groups": GROUPS}
    out = {
        "self_attention.layernorm_qkv.layer_norm_weight": hf["input_layernorm.weight"],
        "self_attention.proj.weight": hf["self_attn.o_proj.weight"],
        "layernorm_mlp.layer_norm_weight": hf["post_attention_layernorm.weight"],
        "layernorm_mlp.fc1_weight": torch.cat([hf["mlp.gate_proj.weight"], hf["mlp.up_proj.weight"]]),
        "layernorm_mlp.fc2_weight": hf["mlp.down_proj.weight"],
    }
    for part in ("weight", "bias"):
        if f"self_attn.q_proj.{part}" in hf:
            qkv = (hf[f"self_attn.{p}_proj.{part}"] for p in "qkv")
            out[f"self_attention.layernorm_qkv.{part}"] = fuse_qkv(*qkv, **shape)
    for norm in ("q_norm", "k_norm"):
        if f"self_attn.{norm}.weight" in hf:
            out[f"self_attention.{norm}.weight"] = hf[f"self_attn.{norm}.weight"]
    return out


def emulated(family: str, attention: str = "bshd") -> te.TransformerLayer:
    """The same layer, in float32, with the Hugging Face layer's weights."""
    options = dict(QK_NORM) if family == "qwen3" else {}
    module = layer(attention, params_dtype=torch.float32, kv_channels=SIZE, layernorm_epsilon=1e-6, **options)
    if family == "qwen2":
        outputs = (HEADS + 2 * GROUPS) * SIZE
        module.self_attention.layernorm_qkv = te.LayerNormLinear(HIDDEN, outputs, eps=1e-6, bias=True)
    weights = {name: p.detach() for name, p in hugging_face(family).named_parameters()}
    module.load_state_dict(in_tes_layout(weights))
    return module


def batch(rows: int = 4, length: int = 32) -> torch.Tensor:
    return torch.randn(rows, length, HIDDEN, generator=torch.Generator().manual_seed(7))


def gradients(
    module: torch.nn.Module, x: torch.Tensor, **call
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output and gradients, the input's among them, of a fixed linear function of the output."""
    x = x.detach().clone().requires_grad_()
    y = module(x, **call)
    y = y[0] if isinstance(y, tuple) else y
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(8)).view_as(y)
    module.zero_grad()
    y.backward(direction.to(y.dtype))
    return y.detach(), {"input": x.grad} | {name: p.grad.clone() for name, p in module.named_parameters()}


def expected(family: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of Hugging Face's layer, in TE's layout."""
    cos_sin = LlamaRotaryEmbedding(config_of(family))(batch(), torch.arange(32)[None])
    y, grads = gradients(hugging_face(family), batch(), position_embeddings=cos_sin)
    return y, {"input": grads.pop("input")} | in_tes_layout(grads)


def error(found: torch.Tensor, reference: torch.Tensor) -> float:
    return ((found.float() - reference.float()).norm() / reference.float().norm()).item()


def rope() -> torch.Tensor:
    return rope_angles(config_of("llama"), 64)


def in_recipe(module: torch.nn.Module, name: str, x: torch.Tensor, **call):
    """Gradients under BF16 autocast; delayed scaling's after a step that calibrates it."""
    recipe = RECIPES[name]
    for _ in range(2 if name == "delayed" else 1):
        with torch.autocast("cpu", dtype=torch.bfloat16), te.autocast(enabled=bool(recipe), recipe=recipe):
            run = gradients(Inside(module), x, rotary_pos_emb=rope(), **call)
    return run


class Inside(torch.nn.Module):
    """Leaves the contexts before backward, as training does; parameters keep their names."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.inner = module

    def named_parameters(self, *args, **kwargs):
        return self.inner.named_parameters(*args, **kwargs)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("family", HF_LAYERS)
def test_float32_is_hugging_face(family):
    y, grads = expected(family)
    found, found_grads = gradients(emulated(family), batch(), rotary_pos_emb=rope())
    assert found_grads.keys() == grads.keys()
    assert error(found, y) < 1e-5
    for name, grad in grads.items():
        assert error(found_grads[name], grad) < 2e-5, name


@pytest.mark.parametrize("family", HF_LAYERS)
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_near_hugging_face(name, family):
    """A BF16 value is off by up to 2^-9, an E4M3 one by 2^-4, an E5M2 one by 2^-3; four GEMMs add up."""
    y, grads = expected(family)
    found, found_grads = in_recipe(emulated(family), name, batch())
    assert found.dtype == torch.bfloat16 and found_grads["layernorm_mlp.fc1_weight"].dtype == torch.float32
    least, most, most_of_gradients = (0.001, 0.015, 0.02) if name == "bf16" else (0.03, 0.12, 0.2)
    assert least < error(found, y) < most
    for key, grad in grads.items():
        assert least < error(found_grads[key], grad) < most_of_gradients, key


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def cast_fp32_blocks(block: tuple[int, int]) -> Callable[[torch.Tensor], Quantized]:
    return lambda x: cast_blocks(x, E4M3, block, power_of_two=False)


# By recipe and kind: the casts for GEMMs that contract features, and for those that contract tokens.
OPERANDS = {
    "current": {
        "input": (lambda x: cast_tensor(x, E4M3), lambda x: cast_tensor(x, E4M3)),
        "weight": (lambda x: cast_tensor(x, E4M3), lambda x: cast_tensor(x, E4M3)),
        "grad": (lambda x: cast_tensor(x, E5M2), lambda x: cast_tensor(x, E5M2)),
    },
    "block": {
        "input": (lambda x: cast_blocks(x, E4M3, (1, 128)), lambda x: cast_blocks(x, E4M3, (128, 1))),
        "weight": (lambda x: cast_blocks(x, E4M3, (128, 128)), lambda x: cast_blocks(x, E4M3, (128, 128))),
        "grad": (lambda x: cast_blocks(x, E4M3, (1, 128)), lambda x: cast_blocks(x, E4M3, (128, 1))),
    },
    "block_fp32": {
        "input": (cast_fp32_blocks((1, 128)), cast_fp32_blocks((128, 1))),
        "weight": (cast_fp32_blocks((128, 128)), cast_fp32_blocks((128, 128))),
        "grad": (cast_fp32_blocks((1, 128)), cast_fp32_blocks((128, 1))),
    },
    "mxfp8": {
        kind: (lambda x: cast_mx(x, E4M3, dim=1), lambda x: cast_mx(x, E4M3, dim=0))
        for kind in ("input", "weight", "grad")
    },
}


def operand(name: str, kind: str, x: torch.Tensor, *, across: bool) -> torch.Tensor:
    """float64, of what is in BF16 before FP8; `across`: for a GEMM that contracts its first side."""
    return OPERANDS[name][kind][across](x.detach().bfloat16()).dequantize().double()


@pytest.mark.parametrize("name", OPERANDS)
def test_gemms_take_the_operands_of_their_recipe(name):
    """Values of very different sizes along both sides, so that every block has a scale of its own."""
    torch.manual_seed(5)
    module = te.Linear(256, 384, params_dtype=torch.float32)
    x, grad = uneven(256, 256).bfloat16().requires_grad_(), uneven(256, 384).bfloat16()
    with torch.no_grad():
        module.weight.copy_(uneven(384, 256))
    with torch.autocast("cpu", dtype=torch.bfloat16), te.autocast(enabled=True, recipe=RECIPES[name]):
        y = module(x)
    y.backward(grad)

    def product(a: tuple, b: tuple, *, across: tuple[bool, bool]) -> torch.Tensor:
        a, b = (operand(name, *ab, across=side) for ab, side in zip((a, b), across, strict=True))
        return (a.T if across[0] else a) @ (b if across[1] else b.T)

    x_, weight, grad_ = ("input", x), ("weight", module.weight), ("grad", grad)
    rounded(y, product(x_, weight, across=(False, False)))
    rounded(x.grad, product(grad_, weight, across=(False, True)))
    rounded(module.weight.grad, product(grad_, x_, across=(True, True)))


def uneven(rows: int, columns: int) -> torch.Tensor:
    """Sizes that differ by powers of two up to 2^16 from row to row and from column to column."""
    return torch.randn(rows, columns) * 2.0 ** (
        torch.randint(-8, 9, (rows, 1)) + torch.randint(-8, 9, (columns,))
    )


@pytest.mark.parametrize("name", OPERANDS)
def test_biases_stay_in_high_precision(name):
    torch.manual_seed(5)
    module = te.LayerNormLinear(128, 256, bias=True, params_dtype=torch.float32)
    with torch.no_grad():
        module.bias.normal_(std=100.0)
    x, grad = torch.randn(128, 128).bfloat16(), torch.randn(128, 256).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16), te.autocast(enabled=True, recipe=RECIPES[name]):
        y = module(x)
    y.backward(grad)
    normed = torch.nn.functional.rms_norm(x.float(), (128,), eps=1e-5).bfloat16()
    product = (
        operand(name, "input", normed, across=False) @ operand(name, "weight", module.weight, across=False).T
    )
    rounded(y, product + module.bias.detach().bfloat16().double())
    rounded(module.bias.grad, grad.double().sum(0))


def rounded(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Is it what rounding to BF16 makes of it, but for float32 sums in another order?"""
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6 * exact.abs().max().item())
    assert (found.double() == exact.bfloat16().double()).double().mean() > 0.99


@pytest.mark.parametrize("name", [*OPERANDS, "delayed"])
def test_what_fused_casts_read(name):
    """Delayed scaling casts float32 results of norm and SwiGLU; current scaling has SwiGLU's amax of them."""
    torch.manual_seed(6)
    mlp, recipe = te.LayerNormMLP(256, 256, params_dtype=torch.bfloat16), RECIPES[name]
    with torch.no_grad():
        mlp.layer_norm_weight.normal_(1.0, 0.5)
    x = torch.randn(128, 256).bfloat16()
    with torch.no_grad(), te.autocast(enabled=True, recipe=recipe):
        y = mlp(x)
    fused = name == "delayed"

    def cast(kind, value, amax=None):
        if fused:
            return cast_with_scale(value, torch.tensor(1.0), E4M3).dequantize()
        if amax is not None and name == "current":
            return cast_tensor(value, E4M3, amax=amax).dequantize()
        return operand(name, kind, value, across=False).float()

    gamma = mlp.layer_norm_weight.float()
    normed = x.float() * x.float().square().mean(-1, keepdim=True).add(1e-5).rsqrt() * gamma
    hidden = cast("input", normed if fused else normed.bfloat16()) @ cast("weight", mlp.fc1_weight).T
    gate, up = hidden.bfloat16().float().chunk(2, dim=-1)
    act = torch.nn.functional.silu(gate) * up
    act_q = cast("input", act if fused else act.bfloat16(), act.abs().max())
    exact = act_q.double() @ cast("weight", mlp.fc2_weight).double().T
    assert (y.double() == exact.bfloat16().double()).double().mean() > 0.97


@pytest.mark.parametrize("name", RECIPES)
def test_packed_sequences_are_as_if_alone(name):
    """The same tokens as rows, or as one packed row whose sequences differ in length."""
    lengths = [5, 59, 32, 32]
    cu_seqlens = torch.tensor([0, 5, 64, 64, 96, 128], dtype=torch.int32)  # one of them is empty
    x = torch.randn(128, HIDDEN, generator=torch.Generator().manual_seed(9))
    packed, packed_grads = in_recipe(emulated("qwen3", "thd"), name, x, cu_seqlens_q=cu_seqlens)
    if name in ("bf16", "block", "mxfp8"):  # tokens do not share a scale across 64 or more of them
        for part, whole in zip(x.split(lengths), packed.split(lengths), strict=True):
            if len(part) == 32 or name == "bf16":
                alone, _ = in_recipe(emulated("qwen3"), name, part[None])
                assert error(whole, alone[0]) < (1e-3 if name == "bf16" else 1e-2)
    rows = x.view(4, 32, HIDDEN)
    apart, grads = in_recipe(emulated("qwen3"), name, rows)
    even = torch.arange(0, 129, 32, dtype=torch.int32)
    together, together_grads = in_recipe(emulated("qwen3", "thd"), name, x, cu_seqlens_q=even)
    assert error(together, apart.flatten(0, 1)) < 1e-3
    for key, grad in grads.items():
        assert error(together_grads[key], grad.view_as(together_grads[key])) < 1e-2, key
    assert error(packed, together) > 0.05 and packed_grads.keys() == grads.keys()


def test_tokens_see_their_own_past_alone():
    module, x = emulated("llama", "thd"), batch()[0]
    cu_seqlens = torch.tensor([0, 12, 32], dtype=torch.int32)
    changed = x.clone()
    changed[20] += 1.0
    call = {"rotary_pos_emb": rope(), "cu_seqlens_q": cu_seqlens}
    with torch.no_grad():
        differs = (module(x, **call) != module(changed, **call)).any(-1)
    assert differs.tolist() == [i >= 20 for i in range(32)]


def test_the_interface_is_tes():
    """What the suite asks of `transformer_engine.pytorch` and `transformer_engine.common.recipe`."""
    cfg = PrecisionConfig(fp8_format="e4m3", fp8_margin=1, fp8_amax_history_len=7)
    delayed = make_recipe("delayed", cfg, "emulated")
    assert (delayed.margin, delayed.amax_history_len, delayed.fp8_format) == (1, 7, te.Format.E4M3)
    assert {f.name: (f.dtype("input"), f.dtype("grad")) for f in te.Format} == {
        "E4M3": (E4M3, E4M3),
        "HYBRID": (E4M3, E5M2),
    }
    for name in ("delayed", "current", "block", "mxfp8"):
        assert why_not(name, "emulated") is None
        make_recipe(name, PrecisionConfig(), "emulated")
    assert "random" in why_not("nvfp4", "emulated")
    assert type(emulated("llama").self_attention.core_attention).__name__ == "DotProductAttention"


EMULATED = "--use_te --te_backend emulated --mixed_precision fp8 --max_steps 4 --save_interval 2"


def scaling_files(folder) -> dict[str, torch.Tensor]:
    files = sorted((folder / "checkpoints" / "step_000004").glob("*.safetensors"))
    return {key: tensor for file in files for key, tensor in load_file(file).items() if "scaling_" in key}


def test_a_run_resumes_bit_for_bit_and_exports(tmp_path):
    whole = train(tmp_path / "whole", f"{EMULATED} --fp8_scenario delayed --gradient_checkpointing")
    again = train(
        tmp_path / "again",
        f"{EMULATED} --fp8_scenario delayed --gradient_checkpointing "
        f"--resume {whole}/checkpoints/step_000002",
    )
    steps = losses(whole)
    assert losses(again) == {step: steps[step] for step in (3, 4)}
    expected = exported(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in exported(again).items())
    assert "model.layers.0.self_attn.q_proj.weight" in expected
    scales = scaling_files(whole)
    assert len(scales) == 3 * 4 * 2 * 2  # layers, modules, directions, scale and history
    assert all(torch.equal(tensor, scaling_files(again)[name]) for name, tensor in scales.items())
    environment = json.loads((whole / "env.json").read_text())
    assert (environment["te_backend"], environment["emulated"]) == ("emulated", True)
    assert environment["coverage"]["fp8_modules"] == 9  # qkv, proj and MLP of three layers


@pytest.mark.parametrize("name", ["bf16", "current", "block", "mxfp8"])
def test_every_recipe_trains(name, tmp_path):
    precision = "bf16" if name == "bf16" else f"fp8 --fp8_scenario {name}"
    folder = train(
        tmp_path / name,
        f"--use_te --te_backend emulated --mixed_precision {precision} --max_steps 3 --no_export",
    )
    steps = losses(folder)
    assert steps[3] < steps[1]
