"""Forms of FP8 weights by config.json's `quantization_config` or ModelOpt's hf_quant_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8_suite.te_models.quantized.formats import ROW, SQUARE, TENSOR, Block

MODELOPT_FILE = "hf_quant_config.json"
MODELOPT_BLOCKS = {"FP8": TENSOR, "FP8_PER_CHANNEL_PER_TOKEN": ROW}
COMPRESSED_FORMATS = ("float-quantized", "naive-quantized", "mixed-precision", None)


class UnsupportedForm(ValueError):
    """Quantized weights that cannot be dequantized; the message names the method."""


@dataclass(frozen=True)
class Quantization:
    """Method that quantized a checkpoint to FP8, and the blocks that its scales may have."""

    method: str
    blocks: tuple[Block, ...]


def read_quantization(fields: Mapping[str, Any]) -> Quantization:
    """Return the FP8 form of a quantization configuration. UnsupportedForm for all others."""
    method = fields.get("quant_method")
    reader = READERS.get(str(method).lower())
    if reader is None:
        details = (fields.get(name) for name in ("bnb_4bit_quant_type", "quant_type"))
        detail = next((f" ({value})" for value in details if value), "")
        raise UnsupportedForm(f"{method or 'an unknown method'}{detail}")
    try:
        return Quantization(str(method), tuple(dict.fromkeys(reader(fields))))
    except (AttributeError, TypeError, KeyError) as error:
        raise UnsupportedForm(f"{method}, whose fields cannot be read: {error}") from None


def _fine_grained(fields: Mapping[str, Any]) -> list[Block]:
    """Return the blocks of quant_method fp8: weight_block_size, or whole tensors."""
    if "weight_block_size" not in fields:
        return [SQUARE, TENSOR]  # transformers' default, and AutoFP8's form
    size = fields["weight_block_size"]
    return [TENSOR] if size is None else [_block(size, f"fp8 with weight_block_size {size}")]


def _block(size: Any, form: str) -> Block:
    if isinstance(size, list | tuple) and [type(n) for n in size] == [int, int] and min(size) > 0:
        return size[0], size[1]
    raise UnsupportedForm(form)


def _compressed(fields: Mapping[str, Any]) -> list[Block]:
    """Return the blocks of compressed-tensors' groups; a group without weights quantizes inputs only."""
    groups = [group for group in fields["config_groups"].values() if group.get("weights")]
    sparsity, transform = (fields.get(name) or {} for name in ("sparsity_config", "transform_config"))
    if sparsity.get("format", "dense") != "dense" or transform.get("config_groups"):
        raise UnsupportedForm("compressed-tensors with sparse or rotated weights")
    return [_of_group(group, group.get("format") or fields.get("format")) for group in groups]


def _of_group(group: Mapping[str, Any], stored_as: str | None) -> Block:
    weights = {"num_bits": 8, "type": "int", "symmetric": True} | group["weights"]
    strategy, bits = weights["strategy"], weights["num_bits"]
    form = f"compressed-tensors: {weights['type']} of {bits} bits, strategy {strategy}, format {stored_as}"
    is_fp8 = (weights["type"], bits, weights["symmetric"]) == ("float", 8, True)
    if not is_fp8 or stored_as not in COMPRESSED_FORMATS or strategy not in ("block", "channel", "tensor"):
        raise UnsupportedForm(form)
    if strategy == "block":
        return _block(weights.get("block_structure"), form)
    return ROW if strategy == "channel" else TENSOR


def _modelopt(fields: Mapping[str, Any]) -> list[Block]:
    algorithm = fields.get("quantization", fields).get("quant_algo")
    if algorithm is None:  # only the cache of keys and values is quantized
        return []
    if algorithm not in MODELOPT_BLOCKS:
        raise UnsupportedForm(f"modelopt {algorithm}")
    return [MODELOPT_BLOCKS[algorithm]]


READERS = {"fp8": _fine_grained, "compressed-tensors": _compressed, "modelopt": _modelopt}
