"""Export of a trained model to a folder for `AutoModelForCausalLM.from_pretrained`."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from fp8_suite.core.errors import UserError, bad_setting
from fp8_suite.core.files import hidden, publish, recover, sync_to_disk, write_json, write_remedy
from fp8_suite.core.readers import read_record
from fp8_suite.te_models.quantized.forms import Quantizer, layer_of
from fp8_suite.te_models.spec import ModelSpec, on_meta, tied_names
from fp8_suite.training.checkpoint.store import in_groups
from fp8_suite.training.checkpoint.writer import write_tensors
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

NamedTensors = Iterable[tuple[str, Tensor]]
MAX_SHARD_BYTES = 2 * 2**30


def export_hf(
    folder: Path,
    tensors: NamedTensors,
    *,
    config: Any,
    tokenizer: Any = None,
    generation_config: Any = None,
    trust_remote_code: bool = False,
    code_folder: Path | None = None,
    quantizer: Quantizer | None = None,
) -> Path:
    """Write (name, tensor) pairs as a Hugging Face model folder; return its path. On one process.

    Weights are in BF16, with a `quantizer` those of linear layers in FP8.

    Names and shapes are Hugging Face's, without a tied `lm_head.weight`. About MAX_SHARD_BYTES are in
    memory at a time. Remote code named in `config` is copied from `code_folder`. A
    complete export replaces an earlier one; other files in the folder are kept.
    UserError if a tensor does not match the model of `config`, if `check_export` fails, or if writing fails.
    """
    with replacing_export(folder) as partial:
        config = copy.deepcopy(config)
        config.dtype = torch.bfloat16
        model = on_meta(ModelSpec("", config, None, trust_remote_code), torch.bfloat16)
        config.architectures = [type(model).__name__]
        at_random = quantizer.at_random if quantizer else ()
        stored = _to_hub_format(model, _check_and_cast(model, tensors, at_random))
        write_shards(partial, quantizer.quantize(stored) if quantizer else stored)
        if quantizer:
            config.quantization_config = quantizer.config
        config.save_pretrained(partial)
        (generation_config or GenerationConfig.from_model_config(config)).save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        if code_folder and getattr(config, "auto_map", None):
            for path in code_folder.glob("*.py"):
                shutil.copy(path, partial)
    return folder


def export_adapter(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """Write an adapter for peft; return its path. On one process. It replaces an earlier one as an export."""
    with replacing_export(folder) as partial:
        write_tensors(partial / "adapter_model.safetensors", tensors, {"format": "pt"})
        write_json(partial / "adapter_config.json", config)
    return folder


@contextmanager
def replacing_export(folder: Path, *, listed: bool = True) -> Iterator[Path]:
    """Yield a new, empty folder that becomes `folder` if the block succeeds; see `export_hf`.

    Only an export whose files are `listed` in <folder>.json can be replaced.
    """
    partial = hidden(folder, "partial")
    try:
        recover(folder)
        check_export(folder)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        _publish_export(folder, partial, listed=listed)
    except OSError as error:
        kept = "an earlier export is intact; " if folder.exists() else ""
        remedy = f"{kept}{write_remedy(error)}, or use a folder on another disk"
        reason = f"cannot write the export to {folder}: {error.strerror or error}"
        raise UserError(f"{reason}; {remedy}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_export(folder: Path, source: Path | None = None) -> None:
    """UserError if `folder` holds files that are not from an export, or is `source`, the model to train."""
    if source is not None and source.resolve() == folder.resolve():
        reason = (
            f"the export would overwrite --model_name {source}; choose another folder, or add --no_export"
        )
        raise bad_setting(reason, output_dir=folder.parent)
    if folder.exists() and (folder.is_file() or any(folder.iterdir())) and not _exported_files(folder):
        reason = f"its {folder.name}/ was not exported by a run in this folder; move it away"
        raise bad_setting(reason, output_dir=folder.parent)


def _file_list_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


def _exported_files(folder: Path) -> set[str]:
    """Names of the exported files in `folder`, listed in <folder>.json."""
    return set(read_record(_file_list_path(folder)).get("files", ()))


def _publish_export(folder: Path, partial: Path, *, listed: bool) -> None:
    """Copy the user's files in `folder` to the new export, then publish it durably."""
    for path in (*partial.iterdir(), partial):
        sync_to_disk(path)
    exported = _exported_files(folder) | {path.name for path in partial.iterdir()}
    if folder.exists():

        def skip_exported(directory: str, names: list[str]) -> set[str]:
            return exported if Path(directory) == folder else set()

        shutil.copytree(folder, partial, symlinks=True, ignore=skip_exported, dirs_exist_ok=True)
    if listed:
        write_json(_file_list_path(folder), {"files": sorted(exported)})
    publish(partial, folder)


def _check_and_cast(
    model: nn.Module, tensors: NamedTensors, at_random: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the pairs with floats cast to BF16. UserError unless they are the model's weights, and finite.

    Buffers and weights that transformers keeps in FP32 are not cast. Biases of an expert router, for example,
    need more precision than BF16. Nor are weights to round `at_random`, named as on the hub: BF16 would drop
    small updates.
    """
    experts = any(".experts." in name for name in at_random)  # fused in memory, under other names
    # Detect tied weights on the model: a composite config may set them in a sub-config.
    tied = tied_names(model)
    missing = {name: list(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
    buffers = {name for name, _ in model.named_buffers()}
    parts = [f".{part}." for part in getattr(model, "_keep_in_fp32_modules_strict", None) or ()]
    for name, tensor in tensors:
        if list(tensor.shape) != (shape := missing.pop(name, None)):
            expected = f"has {shape}" if shape else "has no such weight, or it was exported twice"
            raise UserError(f"export: {name} is {list(tensor.shape)}, but the model {expected}")
        exact = name in buffers or any(part in f".{name}." for part in parts)
        exact = exact or name in at_random or (experts and ".experts." in name)
        cast = tensor.bfloat16() if tensor.is_floating_point() and not exact else tensor
        if name not in buffers and not cast.isfinite().all():
            way_out = "--resume an earlier checkpoint with another --output_dir"
            raise UserError(f"not exported: {name} has infinite or NaN values; {way_out}")
        yield name, cast
    if missing:
        raise UserError(f"export: {len(missing)} weights of the model are missing, {min(missing)} first")


def _to_hub_format(model: nn.Module, tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """Convert to the names and shapes of the model's files on the hub, as other programs expect them.

    For many models transformers fuses experts and renames modules at load. Convert back one layer at a time
    to bound memory.
    """
    for _, layer in groupby(tensors, key=lambda pair: layer_of(pair[0])):
        yield from revert_weight_conversion(model, dict(layer)).items()


def write_shards(folder: Path, tensors: NamedTensors) -> None:
    """Write shards as the tensors arrive, then rename them: final names contain the number of shards.

    A shard has at most MAX_SHARD_BYTES, or one larger tensor.
    """
    files: list[list[str]] = []
    total = 0
    on_cpu = ((name, tensor.detach().cpu().contiguous()) for name, tensor in tensors)
    for shard in in_groups(on_cpu, lambda pair: pair[1].nbytes, MAX_SHARD_BYTES):
        write_tensors(folder / f"{len(files)}.part", dict(shard), {})
        files.append([name for name, _ in shard])
        total += sum(tensor.nbytes for _, tensor in shard)
        shard.clear()  # free the memory before the next shard is gathered
    if len(files) == 1:
        (folder / "0.part").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"{number}.part").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)
