"""Precision map of Transformer Engine layers: nested autocasts, scales, recomputation, attention."""

import pytest
import torch
from fp8_suite.te_models.families import FAMILIES
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.precision import precision_map
from fp8_suite.training.precision.coverage import coverage
from fp8_suite.training.precision.precision_map import te_names
from fp8_suite.training.precision.recipes import Precision, build_autocast, resolve_precision, why_not
from fp8_suite.training.precision.scaling import scaling_state

from tests.gpu.models import DEVICE, batch, build, spec
from tests.gpu.test_run import SMALL, losses, train

pytestmark = pytest.mark.gpu
LAYERS = 2
INPUTS = [[100, 60, 96], [256], [31, 225]]


def resolve(**values) -> Precision:
    cfg = config_from_dict({"use_te": True, "te_backend": "native", "mixed_precision": "fp8", **values})
    return precision_map.resolve_map(cfg, resolve_precision(cfg), spec(layers=LAYERS).config)


def train_steps(resolved: Precision, steps: int = 3, **options) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """Train some steps in these recipes; return the model, and its losses and gradients."""
    model = build(spec(layers=LAYERS), use_te=True, packed=True, **options)
    precision_map.apply(model, resolved)
    autocast = build_autocast(resolved, device=DEVICE, parameter_dtype=torch.bfloat16)
    inputs, results = batch(INPUTS, packed=True), []
    for _ in range(steps):
        with autocast():
            loss = model(**inputs).loss
        loss.backward()
        results += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        with torch.no_grad():
            for p in model.parameters():
                p -= 1e-4 * p.grad
                p.grad = None
    return model, results


@pytest.mark.parametrize("family", FAMILIES)
def test_module_names_match_a_te_model(family):
    model = build(spec(layers=LAYERS, family=family), use_te=True, packed=False)
    kinds = ("Linear", "LayerNormLinear", "LayerNormMLP")
    gemms = [name for name, module in model.named_modules() if type(module).__name__ in kinds]
    assert [name for name in gemms if name != "lm_head"] == te_names(LAYERS)


@pytest.mark.parametrize("recompute", [False, True])
def test_every_module_runs_in_its_assigned_recipe(recompute):
    rest = "current" if why_not("block") else "block"
    text = "layers.1.self_attention.proj=current,layers.1.layernorm_mlp=delayed"
    resolved = resolve(precision_map=text, bf16_first_layers=1, fp8_scenario=rest)
    model, results = train_steps(resolved, recompute="layer" if recompute else "none")
    rows = {(row.modules.rpartition(".")[2], row.precision): row.count for row in coverage(model).rows}
    assert rows == {
        ("layernorm_qkv", "bf16"): 1,
        ("proj", "bf16"): 1,
        ("layernorm_mlp", "bf16"): 1,
        ("layernorm_qkv", f"fp8 {rest}"): 1,
        ("proj", "fp8 current"): 1,
        ("layernorm_mlp", "fp8 delayed"): 1,
        ("core_attention", "bf16"): 2,
        ("lm_head", "bf16"): 1,
    }
    assert {name.partition(".scaling")[0] for name in scaling_state(model)} == {"layers.1.layernorm_mlp"}
    scales = [t for name, t in scaling_state(model).items() if name.endswith(".scale")]
    # Scales of all cast tensors (input and weight forward, gradient backward) differ from the initial 1.
    assert all((scale != 1).sum() >= 2 for scale in scales)
    _, in_bf16 = train_steps(
        Precision("bf16", "bf16", te_backend="native"), recompute="layer" if recompute else "none"
    )
    assert results[0].item() == pytest.approx(in_bf16[0].item(), rel=0.01)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("around", "inside"), [("current", "delayed"), ("delayed", "current")])
def test_a_map_with_one_recipe_for_all_layers_equals_that_recipe(around, inside, recompute, monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    mapped = train_steps(
        resolve(fp8_scenario=around, precision_map=f"layers.*={inside}"),
        recompute="layer" if recompute else "none",
    )
    alone = train_steps(resolve(fp8_scenario=inside), recompute="layer" if recompute else "none")
    torch.testing.assert_close(mapped[1], alone[1], rtol=1e-3, atol=1e-3)
    states = [
        {name: t for name, t in scaling_state(model).items() if "core_attention" not in name}
        for model, _ in (mapped, alone)
    ]
    torch.testing.assert_close(*states, rtol=1e-2, atol=0)
    assert bool(states[0]) == (inside == "delayed")


def test_amaxes_are_reduced_once_per_step_and_direction(monkeypatch):
    """The number of nested autocasts does not matter."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

    reduced, reduce = [], Manager.reduce_and_update_fp8_tensors
    monkeypatch.setattr(
        Manager,
        "reduce_and_update_fp8_tensors",
        lambda forward=True: (reduced.append(forward), reduce(forward=forward)),
    )
    for values in (
        {"fp8_scenario": "current", "precision_map": "layers.*=delayed"},
        {"fp8_scenario": "current", "precision_map": "layers.1=delayed,layers.0=bf16"},
        {"fp8_scenario": "delayed", "precision_map": "proj=current", "bf16_last_layers": 0},
        {"fp8_scenario": "delayed", "bf16_first_layers": 1},
        {"fp8_scenario": "delayed"},
    ):
        reduced.clear()
        train_steps(resolve(**values), steps=2)
        assert reduced == [True, False] * 2, values


def test_a_run_with_delayed_scaling_only_in_the_map_resumes_exactly(tmp_path):
    flags = f"{SMALL} --mixed_precision fp8 --fp8_scenario current --no_export --eval_interval 0"
    flags += " --precision_map layers.1=delayed,layers.2.layernorm_mlp=bf16"
    train(tmp_path / "uninterrupted", flags)
    again = f"--resume {tmp_path / 'uninterrupted' / 'checkpoints' / 'step_000006'}"
    train(tmp_path / "again", f"{flags} {again}")
    uninterrupted = losses(tmp_path / "uninterrupted")
    assert losses(tmp_path / "again") == {step: uninterrupted[step] for step in range(7, 13)}
    assert uninterrupted[12] < 0.8 * uninterrupted[1]
