"""Small FP8 checkpoints for tests, quantized block by block without the suite's reader or writer."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from fp8_suite.te_models.build import build_model
from fp8_suite.te_models.options import BuildOptions
from fp8_suite.te_models.presets import PRESETS
from fp8_suite.te_models.spec import find_model
from fp8_suite.training.optim.adamw import merge_master
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

INDEX = "model.safetensors.index.json"
DYNAMIC = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
Rule = Callable[[torch.Tensor, torch.dtype], torch.Tensor]  # scale of a block by its largest value
STATIC = DYNAMIC | {"strategy": "tensor", "dynamic": False}


def fine_grained(block: tuple[int, int] | None = (128, 128)) -> dict:
    fields = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return fields | {"weight_block_size": block and list(block), "modules_to_not_convert": ["lm_head"]}


def compressed(strategy: str, *, inputs: dict = DYNAMIC, block: tuple[int, int] = (128, 128)) -> dict:
    weights = STATIC | {"strategy": strategy}
    weights |= {"block_structure": list(block)} if strategy == "block" else {}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    fields = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
    return fields | {"config_groups": {"group_0": group}, "quantization_status": "compressed"}


def modelopt(algorithm: str | None = "FP8") -> dict:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}


def calibrated(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a scale up to twice the smallest one, as if calibration had cut no outliers."""
    return (largest / 448 * (1 + torch.rand(()))).to(dtype)


def smallest(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scale that maps the largest value to E4M3's, as DeepSeek and compressed-tensors do."""
    return (largest / 448).to(dtype)


def power_of_two(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the smallest scale that is a power of two."""
    return torch.exp2(torch.ceil(torch.log2(largest.double() / 448))).to(dtype)


def quantize(
    weight: torch.Tensor, height: int, width: int, dtype: torch.dtype, rule: Rule = calibrated
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return E4M3 values and scales of blocks [height, width]."""
    blocks = [band.split(width, 1) for band in weight.float().split(height)]
    scales = [[rule(block.abs().max(), dtype) for block in band] for band in blocks]
    values = [
        [
            (block / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
            for block, scale in zip(*row, strict=True)
        ]
        for row in zip(blocks, scales, strict=True)
    ]
    return torch.cat([torch.cat(row, 1) for row in values]), torch.stack([torch.stack(row) for row in scales])


def save_fp8(
    folder: Path,
    fields: dict,
    *,
    model: str = "tiny-llama",
    scale: torch.dtype = torch.float32,
    rule: Rule = calibrated,
    files: int = 1,
    **sizes,
) -> dict[str, torch.Tensor]:
    """Save a model with random weights, decoder layers in the FP8 form `fields`; return its tensors."""
    torch.manual_seed(0)
    preset = dict(PRESETS[model]) | sizes
    config = AutoConfig.for_model(preset.pop("model_type"), **preset)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.ndim == 2 and ".layers." in name and "gate.weight" not in name:
            tensors |= quantized(name, tensor, fields, scale, rule)
        else:
            tensors[name] = tensor
    write(folder, tensors, files)
    settings = json.loads((folder / "config.json").read_text()) | {"quantization_config": fields}
    (folder / "config.json").write_text(json.dumps(settings))
    return tensors


def quantized(
    name: str, weight: torch.Tensor, fields: dict, dtype: torch.dtype, rule: Rule
) -> dict[str, torch.Tensor]:
    """Return the tensors that store a weight in the form `fields`."""
    rows, columns = weight.shape
    method, inputs = fields["quant_method"], False
    if method == "fp8":
        block, end, inputs = fields["weight_block_size"] or [rows, columns], "_scale_inv", False
    elif method == "modelopt":
        block, end, inputs = [rows, columns], "_scale", True
    else:
        group = fields["config_groups"]["group_0"]
        blocks = {"tensor": [rows, columns], "channel": [1, columns]}
        block = blocks.get(group["weights"]["strategy"]) or group["weights"]["block_structure"]
        end, inputs = "_scale", not group["input_activations"]["dynamic"]
    values, scales = quantize(weight, *block, dtype, rule)
    if scales.numel() == 1 and block == [rows, columns]:
        scales = scales.reshape(()) if method == "modelopt" else scales.reshape(1)
    stored = {name: values, f"{name}{end}": scales}
    unused = {"input_scale": torch.ones(1), "k_scale": torch.ones(()), "weight_zero_point": torch.zeros(1)}
    return stored | {name.replace("weight", end): tensor for end, tensor in unused.items() if inputs}


def write(folder: Path, tensors: dict[str, torch.Tensor], files: int = 1) -> None:
    """Write tensors to one file, or alternately to several: values and scales then are in different files."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    names, metadata = sorted(tensors), {"format": "pt"}
    if files == 1:
        return save_file(tensors, folder / "model.safetensors", metadata=metadata)
    weight_map = {name: f"model-{i % files}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, folder / file, metadata=metadata)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return None


def assert_exact_masters(run: Path, model: Path, *, use_te: bool) -> None:
    """Compare the masters in a run's first checkpoint with the products of values and scales.

    Those of norms, which are in BF16, round to the checkpoint's weights.
    """
    spec = find_model(str(model), init="auto", use_te=use_te)
    options = {"device": torch.device("cpu"), "dtype": torch.float32, "packed": True, "max_positions": 64}
    built = build_model(spec, BuildOptions(te_backend="emulated" if use_te else None, **options))
    files = (run / "checkpoints" / "step_000001").glob("*.safetensors")
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    products = {name: p.detach() for name, p in built.named_parameters() if ".layers." in f".{name}"}
    for name, product in products.items():
        halves = stored[f"model/{name}"], stored[f"optimizer/{name}.master_param"]
        if product.ndim == 1:
            assert torch.equal(halves[0], product.bfloat16()), name
        else:
            assert torch.equal(merge_master(*halves), product), name
    assert len(products) == 3 * (6 if use_te else 9)
