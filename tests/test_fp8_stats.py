"""FP8 tensor statistics: counted by hand, taken from real casts, logged at their steps, drawn."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.fp8_heatmap import draw_casts, last_casts
from te_models import emulation as te
from training import fp8_inspect, torchao_fp8
from training.config import config_from_dict
from training.fp8_inspect import inspection, layers_of, renamed
from training.fp8_stats import (
    EmulatedTE,
    Fp8Stats,
    Tally,
    TorchaoLayers,
    cast_counts,
    check,
    merge,
    shares,
    spread,
)
from training.precision import Precision
from training.precision_map import te_names
from training.run import main
from training.sharding import STRATEGIES

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ONE = torch.tensor(1.0)
HALF_STEP = 2.0**-10  # half of E4M3's smallest value; ties go to zero


def alone():
    return STRATEGIES["single"](torch.device("cpu"), config_from_dict({}))


def counted(values: list[float], data: list[float], scale_inv=ONE, dtype=E4M3) -> dict[str, float]:
    return shares(cast_counts(torch.tensor(values), torch.tensor(data).to(dtype), scale_inv).tolist())


def test_shares_by_hand():
    values = [0.0, -0.0, 2.0, 448.0, 449.0, -500.0, HALF_STEP, -HALF_STEP]
    found = counted(values, [0.0, -0.0, 2.0, 448.0, 448.0, -448.0, 0.0, -0.0])
    assert found == {"underflow": 2 / 8, "overflow": 2 / 8, "amax": 500.0, "scale_min": 1.0, "scale_max": 1.0}


def test_the_format_and_the_scale_decide_what_overflows():
    assert counted([449.0, 57344.0], [448.0, 57344.0], dtype=E5M2)["overflow"] == 0
    assert counted([57345.0, 1.0], [57344.0, 1.0], dtype=E5M2)["overflow"] == 1 / 2
    assert counted([225.0, 1.0], [448.0, 2.0], torch.tensor(0.5))["overflow"] == 1 / 2  # 225 * 2 > 448
    assert counted([225.0, 1.0], [112.5, 0.5], torch.tensor(2.0))["overflow"] == 0


def test_a_largest_value_that_is_rounded_up_is_no_overflow():
    for amax in torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 0.01:
        scale = 448.0 / amax
        assert counted([amax], [448.0], scale.reciprocal())["overflow"] == 0


def test_scales_are_those_of_blocks_that_hold_something():
    values = torch.tensor([[1.0, 2.0], [4.0, 0.0], [0.0, 0.0]])
    scale_inv = torch.tensor([[0.5], [0.25], [2.0**-127]])
    found = shares(cast_counts(values, (values / scale_inv).to(E4M3), scale_inv).tolist())
    assert (found["scale_min"], found["scale_max"]) == (2.0, 4.0)
    assert counted([0.0, 0.0], [0.0, 0.0], torch.tensor(0.125))["scale_min"] == 8.0


def test_not_finite_values_show_in_the_amax():
    found = counted([1.0, torch.inf], [1.0, 448.0])
    assert found["amax"] == torch.inf and found["overflow"] == 1 / 2
    assert torch.tensor(counted([1.0, torch.nan], [1.0, torch.nan])["amax"]).isnan()


def test_casts_add_up():
    one = cast_counts(torch.tensor([1.0, 500.0, HALF_STEP]), torch.tensor([1.0, 448.0, 0.0]).to(E4M3), ONE)
    other = cast_counts(torch.tensor([0.5]), torch.tensor([2.0]).to(E4M3), torch.tensor(0.25))
    assert shares(merge(one, other).tolist()) == {
        "underflow": 1 / 4, "overflow": 1 / 4, "amax": 500.0, "scale_min": 1.0, "scale_max": 4.0
    }  # fmt: skip


def test_a_tally_sums_micro_batches_and_ranks_and_starts_anew():
    class TwoRanks:
        """Another rank has two elements of which nothing is lost, with amaxes and scales twice as large."""

        sum = staticmethod(lambda tensor: tensor + torch.tensor([2.0, 0.0, 0.0]))
        max = staticmethod(lambda tensor: torch.maximum(tensor, tensor * 2))

    tally = Tally()
    for value in (1.0, 600.0):
        tally.add(
            "layers.0.proj", "weight", torch.tensor([value]), torch.tensor([min(value, 448.0)]).to(E4M3), ONE
        )
    assert tally.take(TwoRanks()) == {
        "fp8/layers.0.proj/weight/underflow": 0.0,
        "fp8/layers.0.proj/weight/overflow": 1 / 4,
        "fp8/layers.0.proj/weight/amax": 1200.0,
        "fp8/layers.0.proj/weight/scale_min": 1.0,
        "fp8/layers.0.proj/weight/scale_max": 2.0,
    }
    assert tally.take(TwoRanks()) == {}


def test_scales_of_blocks_are_spread_over_them():
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert spread(scales, (2, 3), torch.Size([3, 4])).tolist() == [[1, 1, 1, 2], [1, 1, 1, 2], [3, 3, 3, 4]]
    assert spread(ONE, None, torch.Size([3, 4])) is ONE


class Tree(nn.Module):
    """One linear at layers.0.self_attention.proj, as the sources look for it."""

    def __init__(self, linear: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"self_attention": nn.ModuleDict({"proj": linear})})])

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0]["self_attention"]["proj"](x)


PROJ = "layers.0.self_attention.proj"


def wide(*shape: int, seed: int) -> torch.Tensor:
    """Normal values whose magnitudes span more than FP8 does."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10 ** torch.empty(shape).uniform_(
        -9, 0, generator=generator
    )


def expected(x: torch.Tensor, dtype: torch.dtype, smallest: float, *, rows: bool = False) -> dict[str, float]:
    """Statistics of a cast scaled by x's own largest value, or by each row's, as a power of two."""
    amax = x.double().abs().amax(1, keepdim=True) if rows else x.double().abs().max()
    scale = torch.finfo(dtype).max / amax
    scale = scale.log2().floor().exp2() if rows else scale
    lost = ((x != 0) & ((x * scale).abs() <= smallest / 2)).double().mean().item()
    scales = {"scale_min": scale.min().item(), "scale_max": scale.max().item()}
    return {"underflow": lost, "overflow": 0.0, "amax": x.abs().max().item(), **scales}


def watch(source, model: nn.Module, step) -> dict[str, dict[str, float]]:
    """Statistics by tensor of one watched step."""
    source.attach(model)
    source.start(1)
    step()
    found = source.finish(alone())
    assert all(name.startswith(f"fp8/{PROJ}/") for name in found)
    tensors = {name.split("/")[2] for name in found}
    return {
        t: {name.rpartition("/")[2]: v for name, v in found.items() if f"/{t}/" in name}
        for t in sorted(tensors)
    }


def test_an_emulated_layer_s_casts_are_counted():
    linear = te.Linear(64, 32)
    weight, x, grad = wide(32, 64, seed=0), wide(16, 64, seed=1), wide(16, 32, seed=2)
    linear.weight.data.copy_(weight)
    model, source = Tree(linear), EmulatedTE(None, None, Path())
    recipe = te.Float8CurrentScaling()

    def step(times: int = 1):
        for _ in range(times):
            with te.autocast(enabled=True, recipe=recipe):
                model(x.clone().requires_grad_()).backward(grad)

    step()
    found = watch(source, model, step)
    assert list(found) == ["activation", "gradient", "weight"]
    assert found["activation"] == pytest.approx(expected(x, E4M3, 2.0**-9))
    assert found["weight"] == pytest.approx(expected(weight, E4M3, 2.0**-9))
    assert found["gradient"] == pytest.approx(expected(grad, E5M2, 2.0**-16))
    assert all(0.01 < found[tensor]["underflow"] < 0.99 for tensor in found)
    step()
    assert source.finish(alone()) == {}  # nothing is counted of steps that are not watched
    assert watch(source, model, lambda: step(2)) == {t: pytest.approx(v) for t, v in found.items()}


def test_delayed_scaling_overflows_where_a_tensor_grew():
    linear = te.Linear(64, 32)
    model, source = Tree(linear), EmulatedTE(None, None, Path())

    def step(size: float = 1.0):
        x = torch.linspace(0, size, 16 * 64).reshape(16, 64).requires_grad_()
        with te.autocast(enabled=True, recipe=te.DelayedScaling()):
            model(x).sum().backward()

    step()
    found = watch(source, model, lambda: step(4.0))
    assert found["activation"]["scale_min"] == pytest.approx(448.0)
    assert (
        found["activation"]["overflow"] == pytest.approx(0.75, abs=0.01) and found["weight"]["overflow"] == 0
    )


def test_blocks_along_rows_are_what_is_counted():
    linear = te.Linear(256, 128)
    x = torch.ones(128, 256)
    x[:, 128:] = 2.0**-4
    x[0, :2] = 1e6  # what else is in their block of 128 is lost
    source, model = EmulatedTE(None, None, Path()), Tree(linear)

    def step():
        with te.autocast(enabled=True, recipe=te.Float8BlockScaling()):
            model(x.clone().requires_grad_()).sum().backward()

    found = watch(source, model, step)["activation"]
    # Powers of two below 448e-6 and 448 * 16.
    assert (found["scale_min"], found["scale_max"]) == (2.0**-12, 4096.0)
    assert found["underflow"] == 126 / x.numel()


def test_only_the_steps_that_are_due_are_counted():
    linear = te.Linear(64, 32)
    model = Tree(linear)
    emulated = Precision("current", "current", te_backend="emulated")
    stats = Fp8Stats(config_from_dict({"fp8_stats_interval": 2}), emulated, Path())
    stats.attach(model)
    logged = {}
    for number in range(1, 5):
        stats.before_step(number)
        with te.autocast(enabled=True, recipe=te.Float8CurrentScaling()):
            model(torch.full((16, 64), 8.0 - number)).sum().backward()
        logged[number] = stats.after_step(number, alone()).get(f"fp8/{PROJ}/activation/amax")
    assert logged == {1: None, 2: 6.0, 3: None, 4: 4.0}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torchao_s_casts_are_repeated(recipe):
    pytest.importorskip("torchao")
    linear = nn.Linear(64, 32, bias=False)
    weight, x, grad = wide(32, 64, seed=0), wide(16, 64, seed=1), wide(16, 32, seed=2)
    linear.weight.data.copy_(weight)
    model, source = Tree(linear), TorchaoLayers(None, None, Path())
    torchao_fp8.convert(model, lambda name: recipe, emulated=True)

    def step():
        model(x.clone().requires_grad_()).backward(grad)

    found, rows = watch(source, model, step), recipe == "rowwise"
    for_gradients = (E4M3, 2.0**-9) if rows else (E5M2, 2.0**-16)
    assert found == {
        "activation": pytest.approx(expected(x, E4M3, 2.0**-9, rows=rows)),
        "weight": pytest.approx(expected(weight, E4M3, 2.0**-9, rows=rows)),
        "gradient": pytest.approx(expected(grad, *for_gradients, rows=rows)),
    }
    assert found["activation"]["underflow"] > 0.05
    step()
    assert source.finish(alone()) == {}


@pytest.mark.parametrize("layers", ["--use_te --te_backend emulated", "", "--gradient_checkpointing"])
def test_a_run_logs_the_steps_that_are_due_and_trains_as_ever(tmp_path, layers):
    if "--use_te" not in layers:
        pytest.importorskip("torchao")
    small = (
        "--num_of_samples 60 --max_seq_length 128 --batch_size 2 --eval_samples 6 --num_workers 0 "
        "--num_proc 1 --learning_rate 1e-3 --log_interval 1 --eval_interval 3 --max_steps 4 "
        "--mixed_precision fp8 --no_save_checkpoints --no_export --gradient_accumulation_steps 2 "
        "--precision_map layers.1=bf16"
    )

    def train(name: str, flags: str = "") -> dict[int, dict]:
        argv = shlex.split(f"{small} {layers} --output_dir {tmp_path / name} {flags}")
        assert main(argv, description="test", start=lambda cfg: torch.device("cpu")) == 0
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return lines

    watched, plain = train("watched", "--fp8_stats_interval 2"), train("plain")
    by_step = {line["step"]: line for line in watched if any(name.startswith("fp8/") for name in line)}
    assert sorted(by_step) == [2, 4]
    assert [line.get("train/loss") for line in watched if line is not by_step.get(line["step"])] == [
        line.get("train/loss") for line in plain
    ]
    names = {name.rpartition("/")[0] for name in by_step[4] if name.startswith("fp8/")}
    linears = 4 if "--use_te" in layers else 7  # qkv, proj, fc1, fc2; or q, k, v, o, gate, up, down
    assert len(names) == 2 * 3 * linears and not any(".layers.1." in name for name in names)
    assert all(0 <= by_step[4][f"{name}/underflow"] < 1 for name in names)
    step, statistics = last_casts(watched)
    assert step == 4 and list(statistics) == ["underflow", "overflow", "amax", "scale_min", "scale_max"]
    assert all(len(values) == len(names) for values in statistics.values())


@pytest.mark.parametrize(
    ("settings", "found", "compiles", "error", "words"),
    [
        (
            {},
            Precision("bf16", "bf16"),
            False,
            ValueError,
            r"--fp8_stats_interval 5: nothing .*bf16; use fp8",
        ),
        ({}, Precision("tensorwise", "tensorwise"), True, ValueError, r"add --no_compile"),
        (
            {"fp8_attention": True},
            Precision("delayed", "delayed", te_backend="native"),
            False,
            ValueError,
            r"--fp8_stats_interval 5 --fp8_attention: .*drop one",
        ),
    ],
)
def test_where_there_can_be_none_it_says_why(settings, found, compiles, error, words):
    with pytest.raises(error, match=words):
        check(config_from_dict(settings | {"fp8_stats_interval": 5}), found, compiles=compiles)
    check(config_from_dict({}), found, compiles=compiles)
    Fp8Stats(config_from_dict({}), found, Path()).after_step(5, alone())


def test_a_missing_package_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setattr(fp8_inspect, "find_spec", lambda name: None)
    native = Precision("delayed", "delayed", te_backend="native")
    with pytest.raises(
        RuntimeError, match=r"nvdlfw_inspect is not installed; run: pip install nvdlfw-inspect"
    ):
        check(config_from_dict({"fp8_stats_interval": 5}), native, compiles=False)
    pins = (Path(__file__).parents[1] / "requirements-gpu.txt").read_text()
    assert fp8_inspect.INSTALL.removeprefix("pip install ") in pins


def mapped() -> Precision:
    recipes = {"layernorm_qkv": "delayed", "proj": "current", "layernorm_mlp": "nvfp4"}
    by_module = {name: recipes[name.rpartition(".")[2]] for name in te_names(12)}
    by_module |= {name: "bf16" for name in te_names(1)}
    return Precision("delayed", "delayed", te_backend="native", by_module=by_module)


def test_te_is_told_what_each_module_s_recipe_can_be_asked():
    told = inspection(layers_of(mapped()), 5, fp8_weights=False)
    assert sorted(told) == ["current", "delayed", "nvfp4"]
    seen = {
        recipe: [
            name
            for name in (*te_names(12), *(f"layers.{i}.layernorm_mlp.fc{n}" for i in (0, 11) for n in (1, 2)))
            if re.search(task["layers"]["layer_name_regex_pattern"], name)
        ]
        for recipe, task in told.items()
    }
    assert seen["current"] == [f"layers.{i}.self_attention.proj" for i in range(1, 12)]
    assert seen["delayed"] == [f"layers.{i}.self_attention.layernorm_qkv" for i in range(1, 12)]
    assert seen["nvfp4"][-2:] == ["layers.11.layernorm_mlp.fc1", "layers.11.layernorm_mlp.fc2"]
    assert len(seen["nvfp4"]) == 11 + 2
    stats = {
        recipe: next(iter(task["transformer_engine"].values()))["tensors_struct"]
        for recipe, task in told.items()
    }
    asked = {recipe: {t["tensor"]: t["stats"] for t in tensors} for recipe, tensors in stats.items()}
    assert "overflows%" in asked["delayed"]["weight"] and "overflows%" not in asked["current"]["activation"]
    assert asked["nvfp4"]["gradient"] == ["underflows%"]
    assert all(t["freq"] == 5 and t["start_step"] == 1 for tensors in stats.values() for t in tensors)
    alone = inspection(layers_of(Precision("current", "current")), 1, fp8_weights=True)["current"]
    assert re.search(alone["layers"]["layer_name_regex_pattern"], "layers.3.layernorm_mlp.fc2")
    (weight,) = (
        t
        for t in alone["transformer_engine"]["LogFp8TensorStats"]["tensors_struct"]
        if t["tensor"] == "weight"
    )
    assert weight["stats"] == ["scale_inv_min", "scale_inv_max"]


def test_te_s_numbers_get_our_names_and_units():
    name = "layers.3.self_attention.layernorm_qkv"
    assert renamed(
        {
            f"{name}_activation_underflows%": torch.tensor(25.0),
            f"{name}_activation_overflows%": 50.0,
            f"{name}_activation_scale_inv_min": 0.25,
            f"{name}_activation_scale_inv_max": 0.5,
            f"{name}_weight_cur_amax": torch.tensor([3.0]),
            "layers.3.layernorm_mlp.fc2_gradient_nvfp4_underflows%": 10.0,
        }
    ) == {
        f"fp8/{name}/activation/underflow": 0.25,
        f"fp8/{name}/activation/overflow": 0.5,
        f"fp8/{name}/activation/scale_max": 4.0,
        f"fp8/{name}/activation/scale_min": 2.0,
        f"fp8/{name}/weight/amax": 3.0,
        "fp8/layers.3.layernorm_mlp.fc2/gradient/underflow": 0.1,
    }


@pytest.mark.skipif(not importlib.util.find_spec("nvdlfw_inspect"), reason="nvdlfw_inspect is not installed")
def test_nvdlfw_inspect_takes_the_configuration(tmp_path):
    from types import SimpleNamespace

    from nvdlfw_inspect.config_manager import ConfigManager
    from nvdlfw_inspect.logging import initialize_logger

    initialize_logger(str(tmp_path))
    features = {"LogFp8TensorStats", "LogNvfp4TensorStats", "LogTensorStats"}
    te_features = {"transformer_engine": SimpleNamespace(features=features)}
    ConfigManager._load_config(inspection(layers_of(mapped()), 5, fp8_weights=False), te_features)
    told = {name: ConfigManager.get_config_for_layer(name) for name in te_names(12)}
    ConfigManager.reset()
    assert not any(told[name] for name in te_names(1))
    assert set(told["layers.7.layernorm_mlp"]["transformer_engine"]) == {
        "LogNvfp4TensorStats",
        "LogTensorStats",
    }


def test_the_heatmap_shows_the_last_statistics():
    records = [
        {"step": 1, "fp8/layers.0.proj/weight/underflow": 0.5},
        {
            "step": 2,
            "fp8/model.model.layers.0.mlp.up_proj/weight/amax": 2.0,
            "fp8/model.model.layers.11.mlp.up_proj/weight/amax": 0.5,
            "fp8/model.model.layers.11.mlp.up_proj/gradient/amax": float("nan"),
            "fp8/model.model.layers.0.mlp.up_proj/weight/underflow": 0.0,
        },
        {"step": 3, "train/loss": 1.0},
    ]
    step, statistics = last_casts(records)
    assert step == 2 and statistics == {
        "amax": {
            ("mlp.up_proj weight", 0): 2.0,
            ("mlp.up_proj weight", 11): 0.5,
            ("mlp.up_proj gradient", 11): pytest.approx(float("nan"), nan_ok=True),
        },
        "underflow": {("mlp.up_proj weight", 0): 0.0},
    }
    figure = draw_casts("run", step, statistics)
    drawn = {axes.get_title(): axes for axes in figure.axes if axes.get_title()}
    assert list(drawn) == ["amax", "underflow"]
    grid = drawn["amax"].images[0].get_array()
    assert grid.shape == (12, 2) and grid[0, 1] == 2.0 and grid[11, 1] == 0.5 and grid.mask.sum() == 22
    assert [label.get_text() for label in drawn["amax"].get_xticklabels()] == [
        "mlp.up_proj gradient",
        "mlp.up_proj weight",
    ]
    assert last_casts(records[2:]) is None
