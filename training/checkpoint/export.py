"""A trained model as a Hugging Face folder that `AutoModelForCausalLM.from_pretrained` reads as it is."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

from core.files import hidden, publish, recover, save_tensors, sync_to_disk, write_json


def export_hf(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    config: Any,
    tokenizer: Any = None,
    generation_config: Any = None,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = 4 * 2**30,
    trust_remote_code: bool = False,
    code_folder: Path | None = None,
) -> Path:
    """Stream (name, tensor) pairs into a Hugging Face model folder and return it; call it on one process.

    Names and shapes are Hugging Face's, without a tied `lm_head.weight`. Floats are cast to `dtype`, but for
    buffers and what transformers keeps in FP32 (biases that choose experts are equal in BF16). About
    `max_shard_bytes` are in memory at a time. An existing export is replaced once this one is complete, but
    for files that no export wrote: <folder>.json lists those of exports. Python code that `config` names
    comes along from `code_folder`.
    ValueError: a tensor that the model of `config` lacks, misses or has in another shape, or what
    `check_export` refuses. RuntimeError: the files could not be written.
    """
    folder = Path(folder)
    partial = hidden(folder, "partial")
    try:
        recover(folder)
        check_export(folder)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        config, model = _on_meta(config, dtype, trust_remote_code)
        exact = kept_in_fp32(model)
        cast = ((n, t if exact(n) else as_dtype(t, dtype)) for n, t in _checked(tensors, _shapes(model)))
        _write_weights(partial, as_published(model, cast), max_shard_bytes)
        config.save_pretrained(partial)
        if code_folder and getattr(config, "auto_map", None):
            for path in code_folder.glob("*.py"):
                shutil.copy(path, partial / path.name)
        (generation_config or GenerationConfig.from_model_config(config)).save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        written = _written(folder) | {path.name for path in partial.iterdir()}
        for path in folder.iterdir() if folder.exists() else ():
            if path.name not in written:
                _copy(path, partial / path.name)
        for path in (*filter(Path.is_file, partial.iterdir()), partial):
            sync_to_disk(path)
        write_json(_list_of(folder), {"files": sorted(written)})
        publish(partial, folder)
    except OSError as error:
        kept = "the earlier export there is untouched" if folder.exists() else "nothing is there"
        raise RuntimeError(
            f"export to {folder} could not be written: {error.strerror or error}; {kept}. Free space, or "
            "point --output_dir at another disk"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def check_export(folder: Path, source: Path | None = None) -> None:
    """ValueError where an export to `folder` would replace what no export wrote, or the model in `source`."""
    if source is not None and source.resolve() == folder.resolve():
        raise ValueError(
            f"--output_dir {folder.parent}: the run would export over --model_name {source}, which it trains "
            "from; choose another folder, or add --no_export"
        )
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not _written(folder)):
        raise ValueError(
            f"--output_dir {folder.parent}: its {folder.name}/ holds what no run of this folder exported; "
            "move that away, choose another folder, or add --no_export"
        )


def _list_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


# What exports before the list, and the tokenizers of transformers, are known to write.
KNOWN = re.compile(
    r"model.*\.safetensors(\.index\.json)?|(generation_)?config\.json|tokenizer.*|chat_template.*|"
    r"special_tokens_map\.json|added_tokens\.json|vocab\..*|merges\.txt|.*\.py"
)


def _written(folder: Path) -> set[str]:
    """Names in `folder` that exports wrote: those listed, or KNOWN ones beside a run's log if none are."""
    try:
        return set(json.loads(_list_of(folder).read_bytes())["files"])
    except FileNotFoundError:
        logged = folder.is_dir() and (folder.parent / "metrics.jsonl").exists()
        return {path.name for path in folder.iterdir() if KNOWN.fullmatch(path.name)} if logged else set()
    except (ValueError, TypeError, KeyError):
        return set()


def _copy(path: Path, to: Path) -> None:
    """A user's file or folder, without taking its room twice where the file system can."""
    if path.is_dir() and not path.is_symlink():
        to.mkdir()
        for inner in path.iterdir():
            _copy(inner, to / inner.name)
        return
    try:
        os.link(path, to, follow_symlinks=False)
    except OSError:
        shutil.copy2(path, to, follow_symlinks=False)


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _on_meta(config: Any, dtype: torch.dtype, trust_remote_code: bool) -> tuple[Any, nn.Module]:
    """A copy of `config` with architecture and dtype set, and its model without storage."""
    config = copy.deepcopy(config)
    config.dtype = dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    config.architectures = [type(model).__name__]
    return config, model


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Of the tensors that are saved: of tied ones, the first alone."""
    # As the model ties them: of its settings, a part's own may say it.
    kept = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - kept
    return {name: tensor.shape for name, tensor in model.state_dict().items() if name not in tied}


def kept_in_fp32(model: nn.Module) -> Callable[[str], bool]:
    """Whether a name's tensor is no weight to cast: a buffer, or what transformers keeps in FP32 itself."""
    buffers = {name for name, _ in model.named_buffers()}
    parts = [f".{part}." for part in getattr(model, "_keep_in_fp32_modules_strict", None) or ()]
    return lambda name: name in buffers or any(part in f".{name}." for part in parts)


def as_published(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    """The tensors as the model's files on the hub have them, which other programs read.

    transformers joins experts and renames parts of many models while it reads them. It undoes that a layer at
    a time, so that no more need be in memory.
    """
    for _, layer in groupby(tensors, key=lambda pair: re.match(r"(.*?\.\d+\.)?", pair[0])[0]):
        yield from revert_weight_conversion(model, dict(layer)).items()


def _checked(
    tensors: Iterable[tuple[str, Tensor]], expected: dict[str, torch.Size]
) -> Iterable[tuple[str, Tensor]]:
    """Pass the pairs on; ValueError at the first that does not belong, or at the end if one is missing."""
    missing = dict(expected)
    for name, tensor in tensors:
        if name not in missing:
            why = "comes twice" if name in expected else "is no weight of this model (a tied one is left out)"
            raise ValueError(f"export: {name} {why}")
        if tensor.shape != missing.pop(name):
            raise ValueError(
                f"export: {name} is {list(tensor.shape)}, but the model has {list(expected[name])}"
            )
        yield name, tensor
    if missing:
        raise ValueError(f"export: {len(missing)} weights of the model are missing, {min(missing)} first")


def _write_weights(folder: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> None:
    """Write shards while the stream lasts; their final names carry their number, known only at its end."""
    shards: list[list[str]] = []
    bucket: dict[str, Tensor] = {}
    filled = total = 0

    def write() -> None:
        save_tensors(bucket, folder / f"{len(shards)}.part", {})
        shards.append(list(bucket))
        bucket.clear()

    for name, tensor in tensors:
        tensor = tensor.detach().cpu().contiguous()
        if bucket and filled + tensor.nbytes > max_shard_bytes:
            write()
            filled = 0
        bucket[name] = tensor
        filled += tensor.nbytes
        total += tensor.nbytes
    write()

    if len(shards) == 1:
        (folder / "0.part").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}.part").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
