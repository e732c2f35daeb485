"""Small FP8 checkpoints for tests, quantized block by block without the suite's reader or writer."""

import json
from pathlib import Path

import torch
from fp8_suite.te_models.presets import PRESETS
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

INDEX = "model.safetensors.index.json"
DYNAMIC = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
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


def quantize(weight: torch.Tensor, height: int, width: int, dtype: torch.dtype) -> tuple:
    """Return E4M3 values and scales of blocks [height, width]; with random factors, as calibration gives."""
    rows, columns = range(0, weight.shape[0], height), range(0, weight.shape[1], width)
    values, scales = (
        torch.empty(weight.shape, dtype=torch.float8_e4m3fn),
        torch.empty(len(rows), len(columns)),
    )
    for i, top in enumerate(rows):
        for j, left in enumerate(columns):
            part = weight[top : top + height, left : left + width].float()
            scale = (part.abs().max() / 448 * (1 + torch.rand(()))).to(dtype).float()
            values[top : top + height, left : left + width] = (part / scale).clamp(-448, 448).to(values.dtype)
            scales[i, j] = scale
    return values, scales.to(dtype)


def save_fp8(
    folder: Path,
    fields: dict,
    *,
    model: str = "tiny-llama",
    scale: torch.dtype = torch.float32,
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
            tensors |= quantized(name, tensor, fields, scale)
        else:
            tensors[name] = tensor
    write(folder, tensors, files)
    settings = json.loads((folder / "config.json").read_text()) | {"quantization_config": fields}
    (folder / "config.json").write_text(json.dumps(settings))
    return tensors


def quantized(name: str, weight: torch.Tensor, fields: dict, dtype: torch.dtype) -> dict[str, torch.Tensor]:
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
    values, scales = quantize(weight, *block, dtype)
    if scales.numel() == 1 and block == [rows, columns]:
        scales = scales.reshape(()) if method == "modelopt" else scales.reshape(1)
    stored = {name: values, f"{name}{end}": scales}
    return stored | ({name.replace("weight", "input_scale"): torch.ones(1)} if inputs else {})


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
