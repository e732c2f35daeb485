"""FP8 through torchao, emulated: converted layers, quantized values, runs of any architecture."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fp8_suite.core.errors import EXIT_BAD_SETTING, EXIT_FAILED, UserError
from fp8_suite.core.recipes import TORCHAO_RECIPES
from fp8_suite.te_models.hugging_face import HFCausalLM, high_precision_linears
from fp8_suite.training.optim.adamw import MasterAdamW, local
from fp8_suite.training.precision import torchao_fp8
from fp8_suite.training.precision.coverage import coverage
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from tests.children import preload, run_ranks
from tests.te_models import test_hugging_face
from tests.te_models.test_hugging_face import TINY
from tests.training.parallel.jobs import SMALL, exported, record, rest, same_bits
from tests.training.parallel.jobs import curve as losses
from tests.training.parallel.jobs import train as train_on_ranks
from tests.training.test_run import train as train_small

preload(__name__)

if find_spec("torchao") is None:
    pytest.skip("torchao is not installed", allow_module_level=True)

LINEARS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
LINEARS += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 8, "pad_token_id": None}
SIZES = TINY | {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128}
SIZES |= {"max_position_embeddings": 256}
FROM_CONFIG = "--init random --tokenizer_name demo"
ON_TWO = f"{SMALL} {FROM_CONFIG} --mixed_precision fp8 --max_steps 4"
GATHERED = "--sharding_mode fsdp_full --fp8_all_gather --gradient_checkpointing --save_interval 2"


def build(model_type: str = "llama", recipe_of=lambda name: "tensorwise", **changes) -> HFCausalLM:
    convert = recipe_of and (lambda model: torchao_fp8.convert(model, recipe_of, emulated=True))
    return test_hugging_face.build(model_type, packed=True, convert=convert, **changes)


def ran(model: HFCausalLM) -> dict[str, tuple[str, str]]:
    """Precision and note by the last part of the modules' names."""
    rows = coverage(model).rows
    return {row.modules.rpartition(".")[2]: (row.precision, row.note) for row in rows}


def test_coverage_counts_every_linear_layer_and_its_share():
    """7 layers a block with 1024 + 512 + 512 + 1024 + 3 * 1536 weights, and a head of 2048, in BF16."""
    table = coverage(build())
    assert table.fp8_modules == 14 and table.fp8_gemm_share == pytest.approx(15360 / 17408)
    rows = {row.modules.removeprefix("model."): (row.count, row.precision) for row in table.rows}
    linears = {f"model.layers.*.{name}": (2, "fp8 tensorwise") for name in LINEARS}
    assert rows == linears | {"lm_head": (1, "bf16")}
    assert {row.gemm_share for row in table.rows if "o_proj" in row.modules} == {2048 / 17408}
    table = coverage(build(recipe_of=lambda name: "rowwise_with_gw_hp"))
    assert table.fp8_gemm_share == pytest.approx(2 / 3 * 15360 / 17408)
    assert any("(gradients of weights in BF16)" in line for line in table.lines())


def test_layers_run_in_the_recipe_of_their_name_or_carry_the_reason():
    recipes = {"q_proj": "rowwise", "k_proj": "bf16", "v_proj": None}
    model = build(intermediate_size=40, recipe_of=lambda n: recipes.get(n.rpartition(".")[2], "tensorwise"))
    modules = ran(model)
    assert modules["q_proj"] == ("fp8 rowwise", "") and modules["o_proj"] == ("fp8 tensorwise", "")
    assert modules["k_proj"] == modules["v_proj"] == ("bf16", "")
    assert modules["up_proj"] == modules["gate_proj"] == ("bf16", "outputs 40: not a multiple of 16")
    assert modules["down_proj"] == ("bf16", "inputs 40: not a multiple of 16")
    lines = coverage(model).lines()
    assert any("down_proj" in line and "(inputs 40: not a multiple" in line for line in lines)


def test_scales_are_any_fp32_number_by_choice():
    model = build(recipe_of=None)
    torchao_fp8.convert(model, lambda name: "rowwise", emulated=True, fp32_scales=True)
    configs = [module.config for module in model.modules() if hasattr(module, "fp8_recipe")]
    assert configs and not any(config.round_scales_to_power_of_2 for config in configs)


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_keep_names_values_and_ties(tied):
    plain, converted = (build(recipe_of=r, tie_word_embeddings=tied) for r in (None, lambda name: "rowwise"))
    before, after = (dict(m.named_parameters()) for m in (plain, converted))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], p) and after[name].dtype == p.dtype for name, p in before.items())
    assert (converted.model.lm_head.weight is converted.model.model.embed_tokens.weight) == tied


def test_a_model_without_linear_layers_is_refused_with_what_it_has():
    with pytest.raises(UserError, match=r"GPT2LMHeadModel .* have no nn\.Linear") as refused:
        build("gpt2")
    assert refused.value.exit_code == EXIT_BAD_SETTING
    with pytest.raises(UserError, match=r"\(8 x inputs 24, outputs 24: not"):
        build(hidden_size=24, num_key_value_heads=4, intermediate_size=40)


def test_missing_torchao_is_refused_before_anything_is_read(monkeypatch, tmp_path, capsys):
    torchao_fp8.require_torchao()
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    train(tmp_path / "run", "--mixed_precision fp8 --model_name /nowhere", code=EXIT_FAILED)
    assert torchao_fp8.INSTALL in capsys.readouterr().err


def quantized(tensor: torch.Tensor, dtype: torch.dtype, dim: int | None, power_of_two: bool) -> torch.Tensor:
    """Cast to FP8 and back to float32, with one scale, or one for each slice along `dim`."""
    tensor = tensor.float()
    largest = tensor.abs().amax() if dim is None else tensor.abs().amax(dim, keepdim=True)
    scale = torch.finfo(dtype).max / largest.double()
    scale = (torch.exp2(scale.log2().floor()) if power_of_two else scale).float()
    return (tensor * scale).to(dtype).float() / scale


def by_hand(recipe: str, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """y = x W^T, dx = dy W, dW = dy^T x as the recipe defines them, from BF16 operands."""
    if recipe == "tensorwise":
        x8, w8 = (quantized(t, E4M3, None, False) for t in (x, weight))
        g8 = quantized(grad, E5M2, None, False)
        return [x8 @ w8.T, g8 @ w8, g8.T @ x8]
    rows, columns = (lambda t: quantized(t, E4M3, 1, True)), (lambda t: quantized(t, E4M3, 0, True))
    y = rows(x) @ rows(weight).T
    if recipe == "rowwise":
        return [y, rows(grad) @ columns(weight), columns(grad).T @ columns(x)]
    dx = rows(grad) @ quantized(weight, E4M3, None, True)
    return [y, dx, grad.float().T @ x.float()]


@pytest.mark.parametrize("recipe", TORCHAO_RECIPES)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["autocast", "bf16"])
def test_the_bf16_weight_is_quantized_wherever_it_is_kept(recipe, stored):
    model = build(recipe_of=lambda name: recipe)
    linear = model.get_submodule("model.model.layers.0.mlp.up_proj").to(stored)
    torch.manual_seed(1)
    linear.weight.data.normal_()
    x = torch.randn(2, 16, 32).to(stored).requires_grad_()
    grad = torch.randn(2, 16, 48).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=stored == torch.float32):
        y = linear(x)
    y.backward(grad)
    assert y.dtype == torch.bfloat16 and linear.weight.grad.dtype == x.grad.dtype == stored
    flat = x.detach().bfloat16().flatten(0, 1), linear.weight.detach().bfloat16(), grad.flatten(0, 1)
    expected = [t.bfloat16().float() for t in by_hand(recipe, *flat)]
    actual = [y.flatten(0, 1), x.grad.flatten(0, 1), linear.weight.grad]
    for result, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(result.float(), reference, rtol=2**-7, atol=1e-3)


def test_linears_are_plain_inside_high_precision_linears():
    model = build()
    linear, x = model.get_submodule("model.model.layers.0.mlp.up_proj"), torch.randn(4, 32)
    exact, in_fp8 = F.linear(x, linear.weight), linear(x)
    with high_precision_linears(model):
        assert torch.equal(linear(x), exact)
    assert torch.equal(linear(x), in_fp8) and not torch.equal(in_fp8, exact)


@pytest.mark.parametrize("model_type", ["llama4_text", "phimoe"])
def test_routers_that_are_linear_layers_are_not_converted(model_type):
    model = build(model_type, **EXPERTS, intermediate_size_mlp=48)
    ids = torch.randint(3, 64, (1, 32), generator=torch.Generator().manual_seed(0))
    loss = model(ids, ids.roll(-1), torch.arange(32)[None]).loss
    loss.backward()
    modules = ran(model)
    assert loss.isfinite() and modules["router"][0] == "bf16" and modules["q_proj"][0] == "fp8 tensorwise"
    assert modules.get("down_proj", ["bf16"])[0] == "bf16"  # Llama 4's shared expert is changed in place


def train(folder: Path, flags: str, *, code: int = 0) -> Path:
    return train_small(folder, f"--batch_size 4 {FROM_CONFIG} {flags}", code=code)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for model_type in ("qwen2", "llama", "gpt_neox"):
        AutoConfig.for_model(model_type, **SIZES).save_pretrained(folder / model_type)
    return folder


# GPT-NeoX: biases, a fused QKV, two layer norms and an MLP without gate; four linear layers instead of seven.
@pytest.mark.parametrize(
    ("model_type", "recipe", "fp8"), [("llama", "rowwise_with_gw_hp", 14), ("gpt_neox", "rowwise", 8)]
)
def test_any_architecture_trains_about_as_in_bf16(model_type, recipe, fp8, models, tmp_path):
    flags = f"--model_name {models / model_type} --max_steps 4 --no_export --no_save_checkpoints"
    reference = losses(train(tmp_path / "bf16", f"{flags} --mixed_precision bf16"))
    rates = record(tmp_path / "bf16", "summary.json")
    assert ("model_tflops_per_gpu" in rates) == (model_type == "llama"), "FLOPs of other families are unknown"
    folder = train(tmp_path / recipe, f"{flags} --mixed_precision fp8 --fp8_scenario {recipe}")
    recorded = record(folder, "env.json")
    assert (recorded["recipe"], recorded["emulated"]) == (recipe, True)
    assert recorded["coverage"]["fp8_modules"] == fp8 and recorded["attention_backend"] == "packed_causal"
    assert losses(folder) == pytest.approx(reference, rel=5e-3) and losses(folder) != reference


def test_a_resumed_run_equals_the_uninterrupted_one_and_its_export_loads(models, tmp_path):
    flags = f"--model_name {models}/qwen2 --mixed_precision fp8 --save_interval 3 --gradient_checkpointing"
    flags += " --bf16_first_layers 1 --precision_map layers.1.mlp=rowwise --max_steps 6"
    uninterrupted = train(tmp_path / "uninterrupted", flags)
    again = train(tmp_path / "again", f"{flags} --resume {uninterrupted}/checkpoints/step_000003")
    assert losses(again) == rest(uninterrupted, 3)
    assert same_bits(exported(uninterrupted), exported(again))
    _, info = AutoModelForCausalLM.from_pretrained(uninterrupted / "export", output_loading_info=True)
    assert not any(info[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    counts: dict[str, int] = {}
    for row in record(uninterrupted, "env.json")["coverage"]["rows"]:
        counts[row["precision"]] = counts.get(row["precision"], 0) + row["count"]
    assert counts == {"bf16": 7 + 1, "fp8 tensorwise": 4, "fp8 rowwise": 3}


@pytest.fixture(scope="module")
def on_one(tmp_path_factory, models) -> dict[int, float]:
    flags = f"--model_name {models}/llama --mixed_precision fp8 --max_steps 4 --no_export"
    return losses(train(tmp_path_factory.mktemp("one") / "run", flags))


def test_two_ranks_train_as_one_process(on_one, models, tmp_path):
    flags = f"{ON_TWO} --model_name {models}/llama --sharding_mode ds_zero3"
    folder = train_on_ranks(tmp_path / "run", flags).folder
    assert losses(folder) == pytest.approx(on_one, rel=2e-3)
    assert record(folder, "env.json")["coverage"]["fp8_modules"] == 14


def test_weights_gathered_in_fp8_train_as_one_process_and_resume_bit_for_bit(on_one, models, tmp_path):
    flags = f"{ON_TWO} --model_name {models}/llama {GATHERED}"
    uninterrupted = train_on_ranks(tmp_path / "uninterrupted", flags).folder
    assert losses(uninterrupted) == pytest.approx(on_one, rel=2e-3)
    resume = f"--resume {uninterrupted}/checkpoints/step_000002"
    again = train_on_ranks(tmp_path / "again", f"{flags} {resume}").folder
    assert losses(again) == rest(uninterrupted, 2)
    assert same_bits(exported(uninterrupted), exported(again))


def gathered(rank: int, folder: Path) -> None:
    """Step BF16 shards under our own optimizer: plain; gathered in FP8, with the state in host memory."""
    mesh = init_device_mesh("cpu", (2,))
    results = {}
    for all_gather in (False, True):
        model = build(recipe_of=None).to(torch.bfloat16)
        torchao_fp8.convert(model, lambda name: "tensorwise", emulated=True, all_gather=all_gather)
        for block in (*model.blocks, model):
            fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        settings = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "moment_dtypes": ("fp32", "fp32")}
        groups = [{"params": list(model.parameters())}]
        optimizer = MasterAdamW(groups, **settings, master_weights=True, offload=all_gather)
        weight = model.get_submodule("model.model.layers.0.mlp.up_proj").weight
        if all_gather:
            torchao_fp8.refresh_scales_after_steps(model, optimizer)
            sent, _ = weight.to_local().fsdp_pre_all_gather(mesh)
            assert [part.dtype for part in sent] == [torch.float8_e4m3fn]
        history = []
        for step in range(3):
            ids = torch.arange(16)[None] + 3 + 7 * rank + step
            loss = model(ids, ids, torch.arange(16)[None]).loss
            loss.backward()
            optimizer.step(scale=torch.tensor(1.0), apply=torch.tensor(True))
            optimizer.zero_grad()
            history.append(loss.item())
        results[all_gather] = history, weight.full_tensor()
        if all_gather:
            largest = local(weight).float().abs().max()
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            assert weight._local_tensor._precomputed_scale == (448 / largest.double()).float()
            one_graph_of_sharded_layers(model, history[-1])
    assert results[True][0] == results[False][0]
    assert torch.equal(local(results[True][1]), results[False][1])


def one_graph_of_sharded_layers(model: HFCausalLM, last: float) -> None:
    """Hooks gather and free the weights; they must not become part of the graph."""
    counters = torch._dynamo.utils.counters
    model.compile_blocks(backend="aot_eager")
    for start in (3, 10):
        ids = torch.arange(16)[None] + start
        loss = model(ids, ids, torch.arange(16)[None]).loss
        loss.backward()
    assert loss.isfinite() and loss < 2 * last
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_bf16_shards_gathered_in_fp8_step_as_plain_ones(tmp_path):
    run_ranks(gathered, tmp_path)
