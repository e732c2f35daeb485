"""Write an exported model with FP8 weights: as part of an export, or from an existing one by this command."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from fp8_suite.core.cli import OneLineParser
from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError
from fp8_suite.core.files import write_json
from fp8_suite.core.readers import UnreadableFile, read_json
from fp8_suite.te_models.quantized.forms import FORMS, Form, Quantizer, fp8_weights, layer_of
from fp8_suite.te_models.quantized.methods import UnsupportedForm, read_quantization
from fp8_suite.te_models.weights import SafetensorsSource
from fp8_suite.training.export.write import replacing_export, require_finite, write_shards
from torch import Tensor

COPIED = ("*.json", "*.jinja", "*.py", "*.model", "*.txt", "*.tiktoken")  # files beside the weights


def quantize_export(source: Path, folder: Path, form: Form) -> list[str]:
    """Write the model in `source`, in BF16 or another FP8 form, to `folder`; return lines for the user.

    UserError if a weight is not finite, none fits the form, or a file cannot be read or written.
    """
    try:
        config = read_json(source / "config.json")
        stored = config.get("quantization_config")
        stored = read_quantization(stored) if stored else None
    except UnsupportedForm as error:
        reason = f"{source}: its weights are quantized by {error}; give the original model"
        raise UserError(reason, exit_code=EXIT_BAD_SETTING) from None
    except UnreadableFile as error:
        raise UserError(
            f"{error}; give the folder of an exported model", exit_code=EXIT_BAD_SETTING
        ) from None
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: is not empty; give a new folder", exit_code=EXIT_BAD_SETTING)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = SafetensorsSource(source, stored, device)
    quantizer = Quantizer(form)
    shapes = weights.shapes()
    if not fp8_weights(shapes, form):
        reason = f"{source}: no linear weight of its layers has sizes that are multiples of {form.multiple}"
        raise UserError(f"{reason}; serve it in BF16", exit_code=EXIT_BAD_SETTING)

    def read() -> Iterator[tuple[str, Tensor]]:
        layers: dict[str, list[str]] = {}
        for name in shapes:
            layers.setdefault(layer_of(name), []).append(name)
        for name in (name for layer in layers.values() for name in layer):
            tensor = weights.get(name).to(device)
            require_finite(name, tensor)
            yield name, tensor

    with replacing_export(folder) as partial:
        for path in (path for pattern in COPIED for path in source.glob(pattern)):
            if path.name not in ("config.json", "model.safetensors.index.json"):
                shutil.copy(path, partial)
        write_shards(partial, quantizer.quantize(read()))
        write_json(partial / "config.json", config | {"quantization_config": quantizer.config})
    return quantizer.describe(config.get("num_key_value_heads"))


def main(argv: list[str] | None = None) -> int:
    """Quantize an export and return the exit code."""
    parser = OneLineParser(
        prog="python -m training.export.quantize",
        description="Write a Hugging Face model with FP8 weights for vLLM and transformers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("source", metavar="EXPORT", type=Path, help="folder of a model, such as RUN/export")
    parser.add_argument("folder", metavar="OUT", type=Path, help="new folder")
    parser.add_argument(
        "--form", choices=list(FORMS), default="block", help="one scale per 128 x 128 block, or per channel"
    )
    try:
        args = parser.parse_args(argv)
        began = time.perf_counter()
        for line in quantize_export(args.source, args.folder, FORMS[args.form]):
            print(line)
        print(f"written to {args.folder} in {time.perf_counter() - began:.1f} s")
        return 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
