"""Loss of exported models: the files are loaded by transformers and evaluated on a run's rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fp8_suite.core.errors import UserError, bad_setting, one_line
from fp8_suite.core.packages import version
from fp8_suite.core.readers import read_record
from fp8_suite.data.context import WHOLE
from fp8_suite.data.loader import Loader
from fp8_suite.data.order import Stored
from fp8_suite.te_models.hugging_face import HFCausalLM
from fp8_suite.te_models.quantized.forms import FORMS, fp8_weights
from fp8_suite.te_models.spec import ModelSpec, auto_class, inference_dtype, on_meta, parameter_shapes
from torch import nn
from transformers import AutoConfig, FineGrainedFP8Config


def require_fp8_export(spec: ModelSpec) -> None:
    """UserError if the model cannot be exported in FP8, or transformers could not load the export here."""
    reason, form = None, FORMS["block"]
    if spec.config.get_text_config() is not spec.config or spec.uses_remote_code:
        reason = "only text models with transformers' own code can be exported in FP8"
    elif not fp8_weights(parameter_shapes(on_meta(spec)), form):
        reason = f"no linear weight of {spec.name} has sizes that are multiples of {form.multiple}"
    elif version("accelerate") is None:
        reason = "transformers needs accelerate to load FP8 weights; pip install accelerate"
    if reason:
        raise bad_setting(f"{reason}, or use bf16", export_dtype="fp8")


def load_export(folder: Path, device: torch.device, *, trust_remote_code: bool = False) -> nn.Module:
    """Load an export with transformers in the dtype for inference. FP8 weights are dequantized.

    UserError if it cannot be loaded, or if weights are missing or left over; torch.OutOfMemoryError.
    """
    options: dict[str, Any] = {"dtype": inference_dtype(device)}
    # FP8 GEMMs of transformers are kernels from the hub. The values are the same in BF16.
    if read_record(folder / "config.json").get("quantization_config", {}).get("quant_method") == "fp8":
        options["quantization_config"] = FineGrainedFP8Config(dequantize=True)
    if device.type == "cuda" and version("accelerate"):
        options["device_map"] = {"": device}
    options |= {"trust_remote_code": trust_remote_code, "output_loading_info": True}
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        kind = auto_class(config, trust_remote_code=trust_remote_code)
        model, info = kind.from_pretrained(folder, **options)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # libraries raise anything
        reason = f"transformers cannot load it ({type(error).__name__}: {one_line(error)})"
        raise UserError(f"{folder}: {reason}") from error
    if wrong := sorted({*info["missing_keys"], *info["unexpected_keys"]}):
        reason = f"{len(wrong)} weights are missing or left over, {wrong[0]} first"
        raise UserError(f"{folder}: transformers cannot load it ({reason})")
    return model.to(device).eval()


@torch.no_grad()
def model_loss(inner: nn.Module, rows: Loader, spec: ModelSpec, device: torch.device) -> float:
    """Return the mean loss of transformers' model over the label tokens of all ranks' `rows`."""
    model = HFCausalLM(inner, known_family=spec.is_known_family).eval()
    model.choose_attention(device, next(inner.parameters()).dtype)
    layout = rows.source.layout
    cfg = replace(layout.cfg, num_workers=0)
    shape = replace(layout.shape, rank=0, world_size=1, context=WHOLE, pin_memory=False)
    source = Stored(rows.source.samples, replace(layout, cfg=cfg, shape=shape), seed=rows.source.seed)
    loader = Loader(source, identity={})
    loss, label_tokens = torch.zeros((), device=device, dtype=torch.float64), 0
    for batch in loader:
        loss += model(**batch.to(device).inputs).loss
        label_tokens += batch.label_tokens
    return loss.item() / max(label_tokens, 1)
