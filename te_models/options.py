"""Options of the model builders, for TE's and Hugging Face's layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from fp8_suite.data.context import Context
from fp8_suite.te_models.backend import Backend
from fp8_suite.te_models.kernels.selection import DEFAULT_KERNELS, Kernels
from fp8_suite.te_models.lora.settings import LoraConfig
from fp8_suite.te_models.parallel.tensor_parallel import TensorParallel
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class NativeOptions:
    """Optimizations on top of the stock te.TransformerLayer (native backend only)."""

    # Cast weights in a step's first micro-batch (`TECausalLM.first_micro_batch`, set by the strategy) only.
    cache_fp8_weights: bool = False
    fuse_gradient_sums: bool = False  # wgrad GEMMs accumulate in `main_grad`: `training.optim.accumulation`
    weight_recipe: Any = None  # recipe of FP8 primary weights, see `fp8_weights.quantize_shards`
    frozen_recipe: Any = None  # recipe of frozen FP8 weights, see `fp8_weights.frozen_in_fp8`


@dataclass(frozen=True)
class ContextParallel:
    """Ranks that share this rank's sequences, and how their attention exchanges keys and values."""

    part: Context  # this rank's part of each sequence
    comm_type: str  # TE's `cp_comm_type`
    group: Any  # process group; for a2a+p2p those of both
    ranks: list[int]  # global numbers
    stream: Any  # TE's CUDA stream, in a2a the main one; None on a CPU


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Layers, device, precision and memory options of a model."""

    te_backend: Backend | None  # None builds Hugging Face's layers
    device: torch.device  # forward and backward passes run here
    dtype: torch.dtype  # parameters' dtype
    packed: bool  # rows hold several sequences, separated by `cu_seqlens`
    max_positions: int  # length of the RoPE tables
    seed: int = 0  # for random weights
    load_weights: bool = True  # False: TE layers start at zero, because a checkpoint follows
    # Splits FP32 weights, dequantized from FP8, into BF16 parameters and their `low_half`.
    split_master: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    compute_dtype: torch.dtype | None = None  # dtype of the forward pass, default `dtype`
    fp8_lm_head: bool = False
    recompute: str = "none"  # see `te_models.settings.recompute_levels`
    offload_activations: bool = False  # see `te_models.recompute.offload`
    reentrant: bool = False  # reentrant activation checkpointing, required by DeepSpeed's ZeRO-3 hooks
    shard: Callable[[nn.Module], None] | None = None  # shards the model, if possible on the meta device
    lora: LoraConfig = field(default_factory=LoraConfig)  # adapters to train instead of the weights
    stages: tuple[range, ...] = ()  # this rank's layers in a pipeline, by stage
    context: ContextParallel | None = None  # TE layers only
    tensor: TensorParallel | None = None  # TE layers only
    kernels: Kernels = DEFAULT_KERNELS  # selected by `training.kernels`
    native: NativeOptions = field(default_factory=NativeOptions)
    # Options of Hugging Face's layers only:
    convert: Callable[[nn.Module], None] | None = None  # replaces linear layers before sharding
    compile_layers: bool = False
