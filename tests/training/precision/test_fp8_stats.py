"""FP8 tensor statistics: counted by hand, collected from real casts, logged at their steps."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fp8_suite.benchmarks.report.figures import draw_casts, last_casts
from fp8_suite.core.errors import UserError
from fp8_suite.te_models import emulation as te
from fp8_suite.te_models.emulation import recipes
from fp8_suite.te_models.emulation.casts import Quantized
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.parallel.strategies import Strategy
from fp8_suite.training.precision import fp8_counts, fp8_stats, torchao_fp8
from fp8_suite.training.precision.fp8_counts import Tally, cast_counts, shares
from fp8_suite.training.precision.fp8_inspect import FEATURE, inspect_config, read_cast
from fp8_suite.training.precision.fp8_stats import Fp8Stats, check
from fp8_suite.training.precision.precision_map import te_names
from fp8_suite.training.precision.recipes import Precision
from torch import nn

from tests.training.test_run import train

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ONE = torch.tensor(1.0)
PROJ = "layers.0.self_attention.proj"
NATIVE = Precision("delayed", "delayed", te_backend="native")


def alone():
    return Strategy("single", torch.device("cpu"), config_from_dict({}))


def counted(values: list[float], data: list[float], scale_inv=ONE, dtype=E4M3) -> dict[str, float]:
    cast = Quantized(torch.tensor(data)[None].to(dtype), scale_inv)
    return shares(cast_counts(torch.as_tensor(values), cast).tolist())


def test_non_finite_values_show_in_the_amax():
    assert counted([1.0, torch.inf], [1.0, 448.0])["amax"] == torch.inf
    assert torch.tensor(counted([1.0, torch.nan], [1.0, torch.nan])["amax"]).isnan()


@pytest.mark.parametrize(
    ("values", "data", "scale_inv", "dtype", "overflow"),
    [
        ([449.0, 57344.0], [448.0, 57344.0], 1.0, E5M2, 0),
        ([448.0, 449.0, -500.0, 0.0], [448.0, 448.0, -448.0, 0.0], 1.0, E4M3, 1 / 2),
        ([57345.0, 1.0], [57344.0, 1.0], 1.0, E5M2, 1 / 2),
        ([225.0, 1.0], [448.0, 2.0], 0.5, E4M3, 1 / 2),
        ([225.0, 1.0], [112.5, 0.5], 2.0, E4M3, 0),
        ([1.0, torch.inf], [1.0, 448.0], 1.0, E4M3, 1 / 2),
        ([0.7], [448.0], 0.7 / 448, E4M3, 0),  # an amax that is rounded up does not overflow
        # A limit between two BF16 values, of which the larger one overflows.
        (torch.tensor([1.0, 1.0078125]).bfloat16(), [448.0, 448.0], (1 + 2.0**-8) / 448, E4M3, 1 / 2),
    ],
)
def test_the_format_and_the_scale_decide_what_overflows(values, data, scale_inv, dtype, overflow):
    assert counted(values, data, torch.tensor(scale_inv), dtype)["overflow"] == overflow


def test_a_tally_sums_micro_batches_and_ranks_and_starts_anew():
    class TwoRanks:
        """Another rank has two elements of which nothing is lost, with amaxes and scales twice as large."""

        sum = staticmethod(lambda tensor: tensor + torch.tensor([2.0, 0.0, 0.0]))
        max = staticmethod(lambda tensor: torch.maximum(tensor, tensor * 2))

    tally = Tally()
    for value in (1.0, 600.0):
        data = torch.tensor([[min(value, 448.0)]]).to(E4M3)
        tally.add("layers.0.proj", "weight", torch.tensor([value]), Quantized(data, ONE))
    expected = {"underflow": 0.0, "overflow": 1 / 4, "amax": 1200.0, "scale_min": 1.0, "scale_max": 2.0}
    assert tally.collect(TwoRanks()) == {f"fp8/layers.0.proj/weight/{k}": v for k, v in expected.items()}
    assert tally.collect(TwoRanks()) == {}


def naive(original, data, scale_inv, block) -> dict[str, float]:
    """Compute the statistics of [M, N] element by element."""
    m, n = block or original.shape
    rows, columns = original.shape
    steps = scale_inv.reshape(1, 1) if block is None else scale_inv
    steps = steps.repeat_interleave(m, 0).repeat_interleave(n, 1)[:rows, :columns]
    x, nonzero = original.float(), original != 0
    return {
        "underflow": (nonzero & (data.float() == 0)).double().mean().item(),
        "overflow": (x.abs() > torch.finfo(data.dtype).max * steps * (1 + 1e-6)).double().mean().item(),
        "amax": x.abs().max().item(),
        "scale_min": 1 / steps[nonzero].max().item(),
        "scale_max": 1 / steps[nonzero].min().item(),
    }


@pytest.mark.parametrize("part", [1000, 2**24])
@pytest.mark.parametrize("block", [None, (1, 128), (128, 128), (1, 32)])
def test_counts_are_the_same_in_parts_of_any_size(monkeypatch, part, block):
    monkeypatch.setattr(fp8_counts, "PART", part)
    original = wide(300, 200, seed=0).bfloat16()
    original[:128] = 0
    shape = () if block is None else [-(-size // of) for size, of in zip((300, 200), block, strict=True)]
    scale_inv = torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 2.0**-9
    scales = scale_inv if block is None else scale_inv.repeat_interleave(block[0], 0)[:300]
    scales = scales if block is None else scales.repeat_interleave(block[1], 1)[:, :200]
    data = (original.float() / scales).clamp(-448, 448).to(E4M3)
    result = shares(cast_counts(original, Quantized(data, scale_inv, block)).tolist())
    assert result == pytest.approx(naive(original, data, scale_inv, block), rel=1e-6)
    assert result["underflow"] > 0.01 and result["overflow"] > 0.001


def test_statistics_that_need_a_missing_value_are_omitted():
    tally, data = Tally(), torch.tensor([[1.0, -448.0, 0.0, 2.0]]).to(E4M3)
    tally.add("kept_in_fp8", "weight", None, Quantized(data, torch.tensor([0.5])))
    tally.add("in_blocks", "weight", None, Quantized(data, torch.tensor([[0.25, 0.5]]), (1, 2)))
    tally.add("no_scales", "weight", data.float(), Quantized(data))
    collected = tally.collect(alone())
    assert sorted(collected) == [
        *(f"fp8/in_blocks/weight/{name}" for name in ("amax", "scale_max", "scale_min")),
        *(f"fp8/kept_in_fp8/weight/{name}" for name in ("amax", "scale_max", "scale_min")),
        *(f"fp8/no_scales/weight/{name}" for name in ("amax", "underflow")),
    ]
    assert collected["fp8/in_blocks/weight/amax"] == 112 and collected["fp8/kept_in_fp8/weight/amax"] == 224


class Tree(nn.Module):
    """A model with one linear layer, at layers.0.self_attention.proj."""

    def __init__(self, linear: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"self_attention": nn.ModuleDict({"proj": linear})})])

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0]["self_attention"]["proj"](x)


def wide(*shape: int, seed: int) -> torch.Tensor:
    """Normal values whose magnitudes span more than FP8 does."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return values * 10 ** torch.empty(shape).uniform_(-9, 0, generator=generator)


def expected(x: torch.Tensor, dtype: torch.dtype, smallest: float, *, rows: bool = False) -> dict[str, float]:
    """Statistics of a cast scaled by x's own largest value, or by each row's, as a power of two."""
    amax = x.double().abs().amax(1, keepdim=True) if rows else x.double().abs().max()
    scale = torch.finfo(dtype).max / amax
    scale = scale.log2().floor().exp2() if rows else scale
    lost = ((x != 0) & ((x * scale).abs() <= smallest / 2)).double().mean().item()
    scales = {"scale_min": scale.min().item(), "scale_max": scale.max().item()}
    return {"underflow": lost, "overflow": 0.0, "amax": x.abs().max().item(), **scales}


def watched(te_backend: str | None, model: nn.Module, recipe: str = "delayed") -> Fp8Stats:
    """Statistics of every second step."""
    precision = Precision(recipe, recipe, te_backend=te_backend)
    stats = Fp8Stats(config_from_dict({"fp8_stats_interval": 2}), precision, Path())
    stats.attach(model)
    return stats


def statistics(stats: Fp8Stats, step) -> dict[str, dict[str, float]]:
    """Statistics by tensor of a watched step; those of a step that is not watched are empty."""
    logged = []
    for number in (1, 2, 3):
        stats.before_step(number)
        step()
        logged.append(stats.after_step(number, alone()))
    assert not logged[0] and not logged[2]
    tensors: dict[str, dict[str, float]] = {}
    for name, value in logged[1].items():
        prefix, module, tensor, statistic = name.split("/")
        assert (prefix, module) == ("fp8", PROJ)
        tensors.setdefault(tensor, {})[statistic] = value
    return tensors


def test_casts_of_an_emulated_layer_are_counted():
    linear, recipe = te.Linear(64, 32), recipes.Float8CurrentScaling()
    weight, x, grad = wide(32, 64, seed=0), wide(16, 64, seed=1), wide(16, 32, seed=2)
    linear.weight.data.copy_(weight)
    model = Tree(linear)

    def step(micro_batches: int = 1):
        for _ in range(micro_batches):
            with te.autocast(enabled=True, recipe=recipe):
                model(x.clone().requires_grad_()).backward(grad)

    stats = watched("emulated", model)
    counts = statistics(stats, step)
    assert counts == {
        "activation": pytest.approx(expected(x, E4M3, 2.0**-9)),
        "weight": pytest.approx(expected(weight, E4M3, 2.0**-9)),
        "gradient": pytest.approx(expected(grad, E5M2, 2.0**-16)),
    }
    assert all(0.01 < counts[tensor]["underflow"] < 0.99 for tensor in counts)
    assert statistics(stats, lambda: step(2)) == {t: pytest.approx(v) for t, v in counts.items()}
    stats.before_step(2)
    stats.close()
    assert "gemms" not in vars(linear)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_casts_of_torchao_are_repeated(recipe):
    pytest.importorskip("torchao")
    linear = nn.Linear(64, 32, bias=False)
    weight, x, grad = wide(32, 64, seed=0), wide(16, 64, seed=1), wide(16, 32, seed=2)
    linear.weight.data.copy_(weight)
    model = Tree(linear)
    torchao_fp8.convert(model, lambda name: recipe, emulated=True)
    counts = statistics(watched(None, model), lambda: model(x.clone().requires_grad_()).backward(grad))
    rows = recipe == "rowwise"
    for_gradients = (E4M3, 2.0**-9) if rows else (E5M2, 2.0**-16)
    assert counts == {
        "activation": pytest.approx(expected(x, E4M3, 2.0**-9, rows=rows)),
        "weight": pytest.approx(expected(weight, E4M3, 2.0**-9, rows=rows)),
        "gradient": pytest.approx(expected(grad, *for_gradients, rows=rows)),
    }
    assert counts["activation"]["underflow"] > 0.05


@pytest.mark.parametrize("layers", ["--use_te --te_backend emulated", "--gradient_checkpointing"])
def test_a_run_logs_the_steps_that_are_due_and_trains_as_without(small, tmp_path, layers):
    if "--use_te" not in layers:
        pytest.importorskip("torchao")
    flags = "--max_steps 4 --gradient_accumulation_steps 2 --mixed_precision fp8 --no_save_checkpoints"
    flags += f" --precision_map layers.1=bf16 --no_export {layers} {small()}"

    def logged(name: str, flags: str) -> list[dict]:
        file = train(tmp_path / name, flags) / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()]

    watched, plain = logged("watched", f"{flags} --fp8_stats_interval 2"), logged("plain", flags)
    by_step = {line["step"]: line for line in watched if any(name.startswith("fp8/") for name in line)}
    assert sorted(by_step) == [2, 4]
    losses = [line.get("train/loss") for line in watched if line is not by_step.get(line["step"])]
    assert losses == [line.get("train/loss") for line in plain]
    names = {name.rpartition("/")[0] for name in by_step[4] if name.startswith("fp8/")}
    linears = 4 if "--use_te" in layers else 7  # qkv, proj, fc1, fc2; or q, k, v, o, gate, up, down
    assert len(names) == 2 * 3 * linears and not any(".layers.1." in name for name in names)
    assert all(0 <= by_step[4][f"{name}/underflow"] < 1 for name in names)
    step, statistics = last_casts(watched)
    assert step == 4 and list(statistics) == ["underflow", "overflow", "amax", "scale_min", "scale_max"]
    assert all(len(values) == len(names) for values in statistics.values())
    panels = {axes.get_title(): axes for axes in draw_casts("run", step, statistics).axes if axes.images}
    assert set(statistics) <= set(panels)
    assert panels["amax"].images[0].get_array().count() == len(names)
    assert last_casts([line for line in watched if line["step"] == 1]) is None


@pytest.mark.parametrize(
    ("precision", "compiles", "words"),
    [
        (Precision("bf16", "bf16"), False, "use fp8"),
        (Precision("tensorwise", "tensorwise"), True, "--no_compile"),
        (NATIVE, False, "pip install nvdlfw"),
    ],
)
def test_a_run_without_casts_to_count_is_refused(monkeypatch, precision, compiles, words):
    monkeypatch.setattr(fp8_stats, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=words) as refused:
        check(config_from_dict({"fp8_stats_interval": 5}), precision, compiles=compiles)
    assert refused.value.flags == {"fp8_stats_interval"}
    check(config_from_dict({}), precision, compiles=compiles)


def test_casts_of_te_are_inspected_in_modules_that_run_in_fp8():
    recipes = {"layernorm_qkv": "delayed", "proj": "bf16", "layernorm_mlp": "nvfp4"}
    by_module = {name: recipes[name.rpartition(".")[2]] for name in te_names(12)}
    names = (*te_names(12), "layers.11.layernorm_mlp.fc1", "layers.11.layernorm_mlp.fc2")
    for precision, expected in (
        (Precision("delayed", "delayed", by_module=by_module), [n for n in names if "proj" not in n]),
        (Precision("current", "current"), list(names)),
    ):
        [task] = inspect_config(precision).values()
        pattern = task["layers"]["layer_name_regex_pattern"]
        assert [name for name in names if re.search(pattern, name)] == expected
        assert task["transformer_engine"] == {FEATURE: {"enabled": True}}


def test_te_packs_two_fp4_values_in_a_byte():
    packed = torch.tensor([[0x00, 0x88, 0x10], [0x01, 0x9F, 0x80]], dtype=torch.uint8)  # 8: minus zero
    cast = read_cast(SimpleNamespace(_rowwise_data=packed, _rowwise_scale_inv=packed, _fp4_dtype=None))
    assert (cast.data != 0).tolist() == [[False] * 4 + [False, True], [True, False, True, True, False, False]]
    assert cast.scale_inv is None
