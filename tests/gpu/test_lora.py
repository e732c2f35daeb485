"""LoRA on native TE layers and on torchao's: gradients, FP8 base, recomputation, resume, sharding."""

import json
from pathlib import Path

import pytest
import torch
from fp8_suite.te_models.lora.adapters import hf_adapters
from fp8_suite.te_models.lora.settings import LoraConfig
from fp8_suite.te_models.options import NativeOptions
from fp8_suite.te_models.settings import RECOMPUTE_LEVELS
from fp8_suite.te_models.spec import base_tensors, find_model
from fp8_suite.training.config import Config
from fp8_suite.training.precision.recipes import make_recipe, why_not
from fp8_suite.training.precision.scaling import scaling_state
from fp8_suite.training.precision.settings import PrecisionConfig
from safetensors.torch import load_file

from tests.gpu.models import batch, build, perturbed, spec
from tests.gpu.test_multi_gpu import GPUS, flags, launch, logged
from tests.gpu.test_offload import assert_same_bits, checkpoint
from tests.gpu.test_run import SMALL, losses, train
from tests.gpu.test_sizes import LARGE
from tests.gpu.test_te_model import bf16, fp8

STATISTICS = "--recompute mlp --gradient_accumulation_steps 2 --fp8_stats_interval 4"
RECIPES = ["delayed", "current", "block"]
LORA = LoraConfig(lora_rank=16)
FLAGS = f"{SMALL} --lora_rank 16 --lora_dropout 0.05 --learning_rate 1e-2 --no_export"


def autocast_of(name: str):
    return bf16() if name == "bf16" else fp8(name)


def build_adapted(
    model_spec, *, use_te: bool = True, packed: bool = True, lora: LoraConfig = LORA, **options
):
    """Build a model whose adapters change its output from the start."""
    model = build(model_spec, use_te=use_te, packed=packed, lora=lora, **options)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for module in hf_adapters(model).values():
            module.lora_b.copy_(0.02 * torch.randn(module.lora_b.shape, generator=generator))
    return model


def gradients(model, name: str, *, packed: bool, steps: int = 1) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the mean loss and the gradients of adapters in the last of some passes."""
    inputs, autocast = batch([[100, 156]] * 8 if packed else [[256]] * 8, packed=packed), autocast_of(name)
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        with autocast():
            loss = model(**inputs).loss
        (loss / (inputs["labels"] != -100).sum()).backward()
    grads = {
        f"{at}.{part}": module.get_parameter(part).grad.float()
        for at, module in hf_adapters(model).items()
        for part in ("lora_a", "lora_b")
    }
    return loss.item() / (inputs["labels"] != -100).sum().item(), grads


def largest_error(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert actual.keys() == expected.keys()
    return max(((actual[name] - grad).norm() / grad.norm()).item() for name, grad in expected.items())


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("targets", ["all", "q_proj,v_proj,layers.0.mlp.up_proj,layers.1.mlp.down_proj"])
def test_te_layers_have_the_gradients_of_hugging_face_layers(targets, family, packed, tmp_path):
    model_spec = perturbed(spec(family=family, layers=2), tmp_path)
    lora = LoraConfig(lora_rank=16, lora_targets=targets)
    results = [
        gradients(build_adapted(model_spec, use_te=use_te, packed=packed, lora=lora), "bf16", packed=packed)
        for use_te in (True, False)
    ]
    (loss, grads), (expected_loss, expected) = results
    assert abs(loss - expected_loss) < 5e-3 and largest_error(grads, expected) < 0.15


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_adapters_over_an_fp8_base_have_gradients_close_to_bf16(recipe):
    passes = 2 if recipe == "delayed" else 1  # the first calibrates
    loss, grads = gradients(build_adapted(spec()), recipe, packed=True, steps=passes)
    exact_loss, exact = gradients(build_adapted(spec()), "bf16", packed=True)
    assert abs(loss - exact_loss) / exact_loss < 0.01 and largest_error(grads, exact) < 0.35


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("recompute", RECOMPUTE_LEVELS)
@pytest.mark.parametrize("frozen", [False, True], ids=["bf16-base", "fp8-base"])
def test_recomputation_and_frozen_fp8_weights_change_no_bits(recipe, recompute, frozen, monkeypatch):
    """Under delayed scaling FP8 weights have scales of their own, so only recomputation is compared."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    if reason := why_not(recipe):
        pytest.skip(reason)
    te_recipe = make_recipe(recipe, PrecisionConfig())
    native = NativeOptions(frozen_recipe=te_recipe)
    lora = LoraConfig(lora_rank=16, lora_dropout=0.1)

    def results(**options):
        model = build_adapted(spec(), lora=lora, **options)
        torch.manual_seed(1)
        loss, grads = gradients(model, recipe, packed=True, steps=2)
        return model, [torch.tensor(loss), *grads.values(), *scaling_state(model).values()]

    kept = {"native": native} if frozen and recipe == "delayed" else {}
    _, expected = results(**kept)
    model, actual = results(recompute=recompute, **({"native": native} if frozen else {}))
    assert all(map(torch.equal, actual, expected))
    if frozen:
        weights = [p for p in model.layers.parameters() if hasattr(p, "get_usages")]
        assert len(weights) == 4 * 4 and not any(p.requires_grad for p in weights)
        assert not any(p.get_usages()["columnwise"] for p in weights), "transposes are freed"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "flags",  # every pair of a recipe, stored FP8 weights and statistics
    [
        "bf16 --recompute mlp --gradient_accumulation_steps 2",
        "fp8 --fp8_scenario delayed",
        f"fp8 --fp8_scenario delayed --fp8_weights {STATISTICS}",
        f"fp8 --fp8_scenario current {STATISTICS}",
        "fp8 --fp8_scenario current --fp8_weights",
        "fp8 --fp8_scenario block",
        f"fp8 --fp8_scenario block --fp8_weights {STATISTICS}",
    ],
)
def test_a_run_resumes_bit_for_bit(flags, tmp_path):
    command = f"{FLAGS} --mixed_precision {flags}"
    output = train(tmp_path / "whole", command)
    assert "BF16 adapters with FP32 masters" in output and " parameters train, in 21 adapters" in output
    train(tmp_path / "resumed", f"{command} --resume {tmp_path}/whole/checkpoints/step_000006")
    curve = losses(tmp_path / "whole")
    assert losses(tmp_path / "resumed") == {at: loss for at, loss in curve.items() if at > 6}
    assert curve[12] < curve[1] - 0.1
    state = checkpoint(tmp_path / "whole", 12)
    assert_same_bits(state, checkpoint(tmp_path / "resumed", 12))
    names = [name for name in state if name.startswith(("model/", "optimizer/"))]
    assert names and all(".lora_" in name for name in names)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("recipe", "recompute"),
    [
        *[("bf16", "none"), ("bf16", "mlp"), ("tensorwise", "none"), ("tensorwise", "layer")],
        *[("rowwise", "mlp"), ("rowwise_with_gw_hp", "layer")],
    ],
)
def test_compiled_hugging_face_layers_train_and_resume(recipe, recompute, tmp_path):
    precision = "bf16" if recipe == "bf16" else f"fp8 --fp8_scenario {recipe}"
    command = FLAGS.replace("--use_te ", "") + f" --mixed_precision {precision} --recompute {recompute}"
    train(tmp_path / "whole", command)
    train(tmp_path / "resumed", f"{command} --resume {tmp_path}/whole/checkpoints/step_000006")
    curve = losses(tmp_path / "whole")
    rest = {at: loss for at, loss in curve.items() if at > 6}
    assert losses(tmp_path / "resumed") == pytest.approx(rest, rel=1e-3)
    assert curve[12] < curve[1] - 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("stored", ["", "--fp8_weights"])
def test_a_merged_export_starts_from_the_weights_before_their_cast_to_fp8(stored, tmp_path):
    flags = f"{FLAGS} --mixed_precision fp8 --fp8_scenario current {stored}".replace(" --no_export", "")
    train(tmp_path / "run", flags)
    base_spec = find_model("tiny-llama", init="random", use_te=True)
    seed = Config().optim.seed
    base = {name: w.cpu() for name, w in base_tensors(base_spec, seed=seed, device=torch.device("cuda"))}
    adapter = load_file(tmp_path / "run/adapter/adapter_model.safetensors")
    exported, adapted = load_file(tmp_path / "run/export/model.safetensors"), 0
    assert exported.keys() == base.keys()
    for name, weight in base.items():
        a, b = (adapter.get(f"base_model.model.{name[:-6]}lora_{part}.weight") for part in "AB")
        expected = weight.bfloat16().float()
        if a is not None:
            adapted += 1
            expected = (expected + 2 * b.float() @ a.float()).bfloat16().float()
        torch.testing.assert_close(exported[name].float(), expected, rtol=2**-7, atol=1e-6)
    assert adapted == len(adapter) / 2 > 0


@pytest.mark.gpu
@pytest.mark.parametrize("flags", ["", "--fp8_weights", "--recompute cheap", "--lora_targets q_proj,v_proj"])
def test_memory_of_adapters_is_predicted(flags, tmp_path):
    command = f"{LARGE.partition(' --global_batch_size')[0]} --batch_size 8 --lora_rank 16 {flags}"
    train(tmp_path / "run", command)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["peak_memory_gb"] == pytest.approx(summary["predicted_memory_gb"], rel=0.05)


@pytest.mark.gpu
def test_adapters_of_two_ranks_on_one_gpu_are_those_of_one(tmp_path):
    compare_sharded(tmp_path, 2, SHARE_GPU="1")


@pytest.mark.multi_gpu
def test_sharded_adapters_are_those_of_one_gpu(tmp_path):
    if GPUS < 2:
        pytest.skip("needs two GPUs")
    compare_sharded(tmp_path, GPUS)


def compare_sharded(folder: Path, ranks: int, **variables: str) -> None:
    """Train on one rank and on several in each mode; the losses must agree."""
    layers = {"te": "", "torchao": ""}
    modes = ["ddp", "fsdp_full", "fsdp_grad"]

    def command(mode: str, kind: str, gpus: int) -> str:
        line = f"{flags(mode, 'current', gpus=gpus, accumulation=2)} --lora_rank 16 --no_export"
        if kind == "torchao":
            line = line.replace("--use_te ", "").replace("--fp8_scenario current", "")
        return line

    one = {kind: command("ddp", kind, 1) for kind in layers}
    one["te-stored"] = f"{one['te']} --fp8_weights"
    launch(folder, one, 1, **variables)
    runs = {f"{kind}-{mode}": command(mode, kind, ranks) for kind in layers for mode in modes}
    runs["te-stored-ddp"] = f"{command('ddp', 'te', ranks)} --fp8_weights"
    launch(folder, runs, ranks, **variables)
    for name in runs:
        origin = name.rpartition("-")[0]
        actual, expected = (logged(folder / run, "train/loss") for run in (name, origin))
        assert actual == pytest.approx(expected, rel=1e-2), name
