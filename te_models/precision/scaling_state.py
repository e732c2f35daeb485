"""Scales and amax histories, which TE keeps outside parameters and buffers.

Only delayed scaling has such state. It is calibrated by passes over the first tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError
from fp8_suite.data.collate import IGNORE
from torch import Tensor, nn

# The first pass runs with scales of 1, where gradients underflow; the second uses the scales of the first.
CALIBRATION_PASSES = 2
CALIBRATION_TOKENS = 16_384  # at most, per rank: a pass over a long micro-batch takes minutes
PER_TOKEN = ("input_ids", "labels", "position_ids")  # inputs of the model, [B, S]


def first_tokens(inputs: dict[str, Any], limit: int = CALIBRATION_TOKENS) -> dict[str, Any]:
    """Return the first rows of a micro-batch, or the beginning of its first row, of at most `limit` tokens.

    Return all of it if it is no longer, or if that part has no labels. `inputs`: see `data.collate.Batch`.
    """
    rows, width = inputs["input_ids"].shape
    part = {name: inputs[name][: max(1, limit // width), :limit] for name in PER_TOKEN}
    tokens = part["input_ids"].numel()
    if tokens == rows * width or (part["labels"] == IGNORE).all():
        return inputs
    if "cu_seqlens" in inputs:
        starts = inputs["cu_seqlens"]
        part["cu_seqlens"] = torch.cat([starts[starts < tokens], starts.new_tensor([tokens])])
    return inputs | part


def scaling_state(model: nn.Module) -> dict[str, Tensor]:
    """Return TE's live scales [n] and amax histories [steps, n] by name, float32, n tensors per module."""
    state: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        for direction in ("scaling_fwd", "scaling_bwd"):
            tensors = getattr(module, "fp8_meta", {}).get(direction)
            for part in ("scale", "amax_history"):
                if isinstance(value := getattr(tensors, part, None), Tensor):
                    state[f"{name}.{direction}.{part}"] = value
    return state


@torch.no_grad()
def scale_gradients(model: nn.Module, factor: float) -> None:
    """Convert the gradients' scales and amaxes to those of a loss multiplied by `factor`.

    Exact, because backward is linear. Delayed scaling starts from scales of 1, where gradients of a loss
    averaged over 10,000 tokens underflow in E5M2, so the first gradients would be wrong (measured:
    docs/precision.md). Gradients of the summed loss do not underflow: calibration uses it.
    """
    for name, tensor in scaling_state(model).items():
        if ".scaling_bwd." in name:
            tensor.mul_(factor if name.endswith("amax_history") else 1 / factor)


@torch.no_grad()
def restore_scaling(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Copy a checkpoint's scales and amax histories into TE's. UserError if the names differ.

    Those that its run did not use, of FP8 weights, keep their calibrated values.
    """
    state = scaling_state(model)
    if saved and saved.keys() != state.keys():
        message = "--resume: the checkpoint's FP8 scaling state belongs to another model or TE version"
        raise UserError(message, flags=("resume",), exit_code=EXIT_BAD_SETTING)
    for name, tensor in saved.items():
        module, live = name.rpartition(".")[0], state[name]
        used = (saved[f"{module}.scale"] != 1) | saved[f"{module}.amax_history"].any(0)
        live.copy_(torch.where(used.to(live.device), tensor.to(live.device), live))


@contextmanager
def frozen_scaling(model: nn.Module) -> Iterator[None]:
    """Restore scales and amax histories on exit, so that evaluation does not affect training."""
    saved = {name: tensor.clone() for name, tensor in scaling_state(model).items()}
    yield
    for name, tensor in scaling_state(model).items():
        if name in saved:
            tensor.copy_(saved[name])
