"""Models that start from FP8 weights: as transformers reads them to the last bit, or refused in one line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fp8_suite.core.errors import UserError
from fp8_suite.te_models.build import build_model, export_tensors
from fp8_suite.te_models.emulation import casts
from fp8_suite.te_models.options import BuildOptions
from fp8_suite.te_models.quantized import forms
from fp8_suite.te_models.quantized.reader import SQUARE, dequantize, rounding_intervals
from fp8_suite.te_models.spec import find_model, weight_source
from fp8_suite.training.optim.adamw import MasterAdamW, merge_master, split_master
from fp8_suite.training.optim.optimizer import set_low_halves, state_of, take_low_halves
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

from tests.children import preload, run_ranks
from tests.fp8_checkpoints import (
    STATIC,
    compressed,
    fine_grained,
    modelopt,
    power_of_two,
    quantized,
    save_fp8,
    smallest,
    write,
)
from tests.te_models.test_remote_code import change_config

preload(__name__)
CPU = torch.device("cpu")
OPTIONS = {"device": CPU, "packed": False, "max_positions": 64}
E8M0 = torch.float8_e8m0fnu
FORMS = {
    **{f"block-{str(dtype)[6:]}": (fine_grained(), dtype) for dtype in (torch.float32, torch.float16, E8M0)},
    "block-64x128-bfloat16": (fine_grained((64, 128)), torch.bfloat16),
    "fp8-tensor": (fine_grained(None), torch.float32),
    "channel": (compressed("channel"), torch.bfloat16),
    "channel-float32": (compressed("channel"), torch.float32),
    "tensor-static": (compressed("tensor", inputs=STATIC), torch.float32),
    "compressed-block": (compressed("block"), torch.bfloat16),
    "modelopt": (modelopt(), torch.float32),
}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def options(use_te: bool, dtype: torch.dtype = torch.float32, **changes) -> BuildOptions:
    return BuildOptions(te_backend="emulated" if use_te else None, dtype=dtype, **OPTIONS | changes)


def find(folder: Path, use_te: bool = False):
    return find_model(str(folder), init="auto", use_te=use_te)


def read_by_library(folder: Path, fields: dict, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights as transformers reads them on a CPU; it has no reader of ModelOpt's form."""
    if fields["quant_method"] == "modelopt":
        tensors = load_file(folder / "model.safetensors")
        scaled = {key: tensors[f"{key}_scale"].float() for key in tensors if f"{key}_scale" in tensors}
        values = {key: tensor.float() * scaled.get(key, 1.0) for key, tensor in tensors.items()}
        return {key: value.to(dtype) for key, value in values.items() if key.endswith(".weight")}
    pytest.importorskip("accelerate")
    reading = FineGrainedFP8Config if fields["quant_method"] == "fp8" else CompressedTensorsConfig
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=reading(dequantize=True)
    )
    return {name: parameter.detach() for name, parameter in model.named_parameters() if "scale" not in name}


def assert_same(tensors, expected: dict[str, torch.Tensor]) -> None:
    tensors = dict(tensors)
    assert tensors.keys() == expected.keys()
    different = [name for name in tensors if not torch.equal(tensors[name].detach(), expected[name])]
    assert not different


@pytest.mark.parametrize("form", FORMS)
def test_both_layers_start_from_transformers_reading(form, tmp_path):
    fields, scale = FORMS[form]
    if fields["quant_method"] == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    model = "tiny-qwen3" if "block" in form else "tiny-llama"
    save_fp8(tmp_path, fields, model=model, scale=scale, files=1 + ("block" in form))
    expected = read_by_library(tmp_path, fields, torch.float32)
    for use_te in (True, False):
        spec = find(tmp_path, use_te)
        assert not hasattr(spec.config, "quantization_config")
        assert spec.dequantized == f"21 tensors ({fields['quant_method']})"
        assert_same(export_tensors(build_model(spec, options(use_te))), expected)
        in_bf16 = {name: tensor.bfloat16() for name, tensor in expected.items()}
        assert_same(export_tensors(build_model(spec, options(use_te, torch.bfloat16))), in_bf16)


# Neither sizes nor block are multiples of the other; transformers would take the blocks for smaller ones.
RAGGED = {"hidden_size": 200, "intermediate_size": 328, "num_hidden_layers": 2}


def test_blocks_at_the_edges_are_smaller(tmp_path):
    reader = pytest.importorskip("compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer")
    for block in ((128, 128), (96, 48)):
        tensors = save_fp8(tmp_path, fine_grained(block), scale=torch.bfloat16, **RAGGED)
        targets = [name.removesuffix(".weight") for name in tensors if f"{name}_scale_inv" in tensors]
        convert = reader.FP8BlockDequantizer(
            targets=targets, weight_block_size=block, dtype=torch.float32
        ).process
        expected = {name: tensor.float() for name, tensor in convert(dict(tensors)).items()}
        for use_te in (True, False):
            assert_same(export_tensors(build_model(find(tmp_path, use_te), options(use_te))), expected)
        source = weight_source(find(tmp_path), seed=0, device=CPU)
        for start, stop in ((0, 1), (95, 130), (130, 131), (7, 7), (255, 256)):
            assert torch.equal(source.rows(Q_PROJ, start, stop), expected[Q_PROJ][start:stop])


ROUND_TRIPS = {
    "block-powers": (fine_grained(), torch.float32, power_of_two, forms.quantize_blocks),
    "block-e8m0": (fine_grained(), E8M0, power_of_two, None),
    "block-deepseek": (fine_grained(), torch.float32, smallest, None),
    "channel": (compressed("channel"), torch.bfloat16, smallest, forms.quantize_channels),
}


@pytest.mark.parametrize("trip", ROUND_TRIPS)
def test_masters_quantized_by_the_checkpoints_rule_are_its_bytes_again(trip, tmp_path):
    """With the suite's own writer too, if it has the rule."""
    fields, scale, rule, write_again = ROUND_TRIPS[trip]
    tensors = save_fp8(tmp_path, fields, scale=scale, rule=rule)
    source = weight_source(find(tmp_path), seed=0, device=CPU)
    assert len(source.fp8) == 21
    for key in source.fp8:
        master = source.get(key)
        again = quantized(key, master, fields, scale, rule)
        for name, tensor in again.items():
            assert torch.equal(tensor.view(torch.uint8), tensors[name].view(torch.uint8)), name
        for written, tensor in zip(write_again(master) if write_again else (), again.values(), strict=False):
            assert torch.equal(written.view(torch.uint8), tensor.view(torch.uint8)), key


def test_dithered_masters_round_to_the_checkpoints_values(tmp_path):
    """After rounding to BF16 too. They fill the rounding intervals, by the same noise in every shard."""
    tensors = save_fp8(tmp_path, fine_grained(), scale=E8M0, rule=power_of_two)
    source = weight_source(replace(find(tmp_path), dithers=True), seed=3, device=CPU)
    middles = weight_source(find(tmp_path), seed=3, device=CPU)
    assert len(source.fp8) == 21
    for key in source.fp8:
        master, middle = source.get(key), middles.get(key)
        values, _ = forms.quantize_blocks(master.bfloat16().float())
        assert torch.equal(values.float(), tensors[key].float()), key
        moved = (master / middle - 1)[middle != 0]
        assert moved.abs().max() > 0.06 and moved.abs().median() > 0.015 and abs(moved.median()) < 0.003
        assert torch.equal(source.rows(key, 30, 77), master[30:77])


def test_rounding_intervals_end_where_bf16_values_round_to_the_next_code():
    codes = torch.arange(1, 126, dtype=torch.uint8)  # positive, below 448
    low, high = rounding_intervals()[1:126].unbind(1)
    assert torch.equal(low[1:], high[:-1])
    for end, away in ((low, 0.0), (high, 1e3)):
        inside, outside = (torch.nextafter(end, to) for to in (low + high - end, torch.full_like(end, away)))
        rounded = [casts.saturate(values.bfloat16().float(), casts.E4M3) for values in (inside, outside)]
        assert torch.equal(rounded[0].view(torch.uint8), codes)
        assert torch.equal(rounded[1].view(torch.uint8).int() - codes, torch.full((125,), 1 if away else -1))


@pytest.mark.parametrize(("rule", "dithered"), [(smallest, 0), (power_of_two, 1)])
def test_only_weights_on_one_grid_are_dithered(rule, dithered, tmp_path):
    save_fp8(tmp_path, fine_grained(), rule=rule)
    specs = [replace(find(tmp_path), dithers=dithers) for dithers in (True, False)]
    weights = [weight_source(spec, seed=3, device=CPU).get(Q_PROJ) for spec in specs]
    assert torch.equal(*weights) == (not dithered) == (not specs[0].on_one_grid)


def test_random_rounding_is_right_on_average():
    """Of weights that have moved from the grid by a tenth of a step, one in ten rounds to the next value."""
    middle = torch.tensor([0.0, 2.0**-8, 1.0, 1.125, -1.875, 24.0, -416.0, 448.0]).repeat(256, 64)
    exponent = torch.floor(torch.log2(middle.abs())).clamp(min=-6)  # subnormal values have the same step
    step = torch.where(middle == 448, 0.0, torch.exp2(exponent - 3).copysign(middle))
    names = [f"model.layers.0.mlp.{name}.weight" for name in ("up_proj", "down_proj")]
    quantizer = forms.Quantizer(forms.FORMS["block"], at_random=names[:1], seed=3)
    stored = dict(quantizer.quantize((name, middle + step / 10) for name in names))
    moved, kept = (dequantize(stored[name], stored[f"{name}_scale_inv"], SQUARE) for name in names)
    assert torch.equal(kept, middle) and torch.equal(moved[:, 7::8], middle[:, 7::8])
    for column in range(7):
        steps = ((moved - middle) / step)[:, column::8]
        assert {*steps.unique().tolist()} == {0.0, 1.0}
        assert steps.mean().item() == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("exponent", [-127, -40, 0, 100])
def test_random_rounding_keeps_every_code(exponent):
    codes = torch.arange(256, dtype=torch.uint8).view(casts.E4M3).float()
    codes[codes.isnan()] = 448.0
    weight = torch.ldexp(codes, torch.tensor(exponent)).repeat(128, 1)
    values, scales = forms.quantize_blocks(weight)
    assert torch.equal(values[0].float(), codes)
    for noise in (-(2**15), 2**15 - 1):
        rounded = forms.round_blocks(weight, torch.full(weight.shape, noise, dtype=torch.int16))
        assert torch.equal(rounded[0].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(rounded[1], scales)


def adamw(model: torch.nn.Module) -> MasterAdamW:
    """Build the optimizer of a GPU with the masters that loading has left."""
    low_halves = take_low_halves(model, offload=False)
    settings = {"lr": 0.1, "betas": (0.9, 0.9), "eps": 1e-8, "moment_dtypes": ("fp32", "fp32")}
    optimizer = MasterAdamW([{"params": list(model.parameters())}], **settings, master_weights=True)
    set_low_halves(optimizer, model, low_halves)
    assert not low_halves
    return optimizer


def test_experts_are_dequantized_before_transformers_merges_them(tmp_path):
    sizes = {"num_local_experts": 4, "model_type": "mixtral"}
    save_fp8(tmp_path, fine_grained(), scale=torch.bfloat16, **sizes)
    expected = read_by_library(tmp_path, fine_grained(), torch.float32)
    model = build_model(find(tmp_path), options(use_te=False))
    assert_same(export_tensors(model), expected)
    assert "model.layers.0.mlp.experts.down_proj" in expected


def load_shards(rank: int, folder: Path, checkpoint: Path) -> None:
    expected = dict(export_tensors(build_model(find(checkpoint), options(use_te=False))))
    mesh = init_device_mesh("cpu", (2,))

    def shard(model: torch.nn.Module) -> None:
        for block in (*model.blocks, model):
            fully_shard(block, mesh=mesh)

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor()

    for use_te in (True, False):
        build = options(use_te, torch.bfloat16, shard=shard, split_master=split_master)
        model = build_model(find(checkpoint, use_te), build)
        for block in (*model.blocks, model):
            block.reshard()
        optimizer = adamw(model)

        def masters(parameters, optimizer=optimizer):
            lows = [state_of(optimizer, p)["master_param"].int() for p in parameters]  # gloo has no int16
            pairs = zip(map(whole, parameters), map(whole, lows), strict=True)
            return [merge_master(parameter, low.short()) for parameter, low in pairs]

        assert_same(export_tensors(model, masters), expected)


def test_ranks_read_the_scales_of_their_rows(tmp_path):
    """Shards of 41 and 164 rows begin within blocks of 96 rows."""
    save_fp8(tmp_path / "model", fine_grained((96, 48)), scale=torch.bfloat16, **RAGGED)
    run_ranks(load_shards, tmp_path, tmp_path / "model")


def test_modelopt_form_is_known_by_its_own_file(tmp_path):
    save_fp8(tmp_path, modelopt())
    expected = weight_source(find(tmp_path), seed=0, device=CPU).get(Q_PROJ)
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"is F8_E4M3, and its config\.json has no quantization_config"):
        find(tmp_path)
    producer = {"name": "modelopt", "version": "0.40"}
    fields = {"producer": producer, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(fields))
    assert torch.equal(weight_source(find(tmp_path), seed=0, device=CPU).get(Q_PROJ), expected)


SCALE = f"{Q_PROJ}_scale_inv"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (SCALE, None, rf"{Q_PROJ} is FP8, but its scales .* are missing"),
        (SCALE, torch.ones(2, 3), rf"{SCALE} has shape \[2, 3\], and .* \[256, 256\] needs .* \[2, 2\]"),
        (SCALE, torch.ones(4), rf"{SCALE} has shape \[4\]"),
        (SCALE, torch.ones(2, 2, dtype=torch.float64), f"{SCALE} is F64"),
        *(
            (SCALE, torch.tensor([[1.0, 1.0], [value, 1.0]]), f"{SCALE} contains {value}")
            for value in (0.0, -1.0, float("inf"), float("nan"))
        ),
        (Q_PROJ, torch.ones(256, 256), f"{Q_PROJ} is F32"),
        (Q_PROJ, torch.ones(256, 256).to(torch.float8_e5m2), f"{Q_PROJ} is F8_E5M2"),
        # As bitsandbytes, compressed-tensors and ModelOpt store INT8, NF4 and NVFP4.
        (Q_PROJ, torch.ones(256, 256).to(torch.int8), f"{Q_PROJ} is I8"),
        (Q_PROJ, torch.ones(256, 128).to(torch.uint8), f"{Q_PROJ} is U8"),
    ],
)
def test_a_tensor_that_cannot_be_dequantized_is_named(name, tensor, message, tmp_path):
    tensors = save_fp8(tmp_path, fine_grained())
    tensors.pop(name)
    write(tmp_path, tensors | ({} if tensor is None else {name: tensor}))
    for use_te in (True, False):
        with pytest.raises(
            UserError, match=f"^--model_name {tmp_path}: {message}.*; give the original model$"
        ):
            find(tmp_path, use_te)


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "mxfp4", None])
def test_other_quantized_weights_are_refused_by_their_method(method, tmp_path):
    save_fp8(tmp_path, modelopt())
    change_config(tmp_path, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(UserError, match=f"its weights are quantized by {method}; give the original") as error:
        find(tmp_path)
    assert error.value.flags == {"model_name"}


@pytest.mark.parametrize("size", [128, [0, 128], [128], ["a", "b"]])
def test_a_wrong_block_size_is_refused(size, tmp_path):
    save_fp8(tmp_path, fine_grained())
    change_config(tmp_path, quantization_config=fine_grained() | {"weight_block_size": size})
    with pytest.raises(UserError, match=r"blocks have two positive sizes .*; give the original model$"):
        find(tmp_path)
