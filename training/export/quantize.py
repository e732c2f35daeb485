"""Command that writes an exported model with FP8 weights."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from fp8_suite.core.cli import as_command, command_parser
from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError, without_flag
from fp8_suite.core.files import write_json
from fp8_suite.core.readers import read_json
from fp8_suite.te_models.quantized.forms import FORMS, Form, Quantizer, layer_of
from fp8_suite.te_models.quantized.reader import MODELOPT_FILE
from fp8_suite.te_models.sources import INDEX
from fp8_suite.te_models.spec import find_model, weight_source
from fp8_suite.training.export.write import replacing_export, write_shards
from torch import Tensor

COPIED = ("*.json", "*.jinja", "*.py", "*.model", "*.txt", "*.tiktoken")  # files beside the weights


def quantize_export(source: str, folder: Path, form: Form) -> str:
    """Write a model, in BF16 or another FP8 form, to `folder`; return a line for the user.

    UserError if a weight is not finite, or if a file cannot be read or written.
    """
    if folder.exists():
        raise UserError(f"{folder}: exists; give a new folder", exit_code=EXIT_BAD_SETTING)
    spec = find_model(source, init="pretrained", use_te=False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights, quantizer = weight_source(spec, seed=0, device=device), Quantizer(form)

    def read() -> Iterator[tuple[str, Tensor]]:
        for name in sorted(weights.shapes(), key=layer_of):
            tensor = weights.get(name).to(device)
            if not tensor.isfinite().all():
                raise UserError(f"{source}: {name} has infinite or NaN values; give another model")
            yield name, tensor

    def quantized() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in quantizer.quantize(read()):
            dequantized = name in weights.fp8 and tensor.dtype == torch.float32  # and does not fit the form
            yield name, tensor.bfloat16() if dequantized else tensor

    with replacing_export(folder, listed=False) as partial:
        for path in (path for pattern in COPIED for path in spec.weights.glob(pattern)):
            if path.name not in (INDEX, MODELOPT_FILE):
                shutil.copy(path, partial)
        write_shards(partial, quantized())
        config = read_json(partial / "config.json") | {"quantization_config": quantizer.config}
        write_json(partial / "config.json", config)
    return quantizer.describe()


@as_command
@without_flag("model_name")
def main(argv: list[str]) -> int:
    """Quantize an export. Exit codes: 0 done, 1 failed, 2 bad setting, 75 interrupted."""
    description = "Write a Hugging Face model with FP8 weights for vLLM and transformers."
    parser = command_parser("python -m training.export.quantize", description)
    parser.add_argument("source", metavar="EXPORT", help="model, such as RUN/export")
    parser.add_argument("folder", metavar="OUT", type=Path, help="new folder")
    scales = "one scale per 128 x 128 block (default), or per channel"
    parser.add_argument("--form", choices=list(FORMS), default="block", help=scales)
    args = parser.parse_args(argv)
    print(quantize_export(args.source, args.folder, FORMS[args.form]))
    print(f"written to {args.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
