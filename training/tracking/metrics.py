"""Table of metrics, FLOP counts and GPU peaks.

A FLOP is one multiplication or one addition: a GEMM of [m, k] x [k, n] has 2*m*k*n. Model FLOPs exclude
recomputed activations, padding and the masked half of attention, so a faster run always has a higher rate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, NamedTuple

from fp8_suite.te_models.families import FAMILIES


class Metric(NamedTuple):
    """Label and format of a logged metric, and how reports reduce the log of a run without summary.json."""

    label: str
    format: str
    summary: Literal["last", "median", "max"] | None = None
    terminal: str | None = None  # format in a progress line; None: not shown


# Metrics in the display and in reports, in order. Rates of emulated runs are logged as emulated/*.
METRICS: dict[str, Metric] = {
    "train/loss": Metric("train loss", "{:.4f}", "last", "loss {:.4f}"),
    "train/grad_norm": Metric("gradient norm", "{:.3g}", terminal="grad norm {:.3g}"),
    "train/learning_rate": Metric("learning rate", "{:.2e}", terminal="lr {:.2e}"),
    "eval/loss": Metric("eval loss", "{:.4f}", "last"),
    "eval/perplexity": Metric("perplexity", "{:.2f}", "last"),
    "eval/token_accuracy": Metric("token accuracy", "{:.2%}", "last"),
    "perf/tokens_per_second": Metric("tokens/s", "{:,.0f}", "median", "{:,.0f} tokens/s"),
    "perf/padded_tokens_per_second": Metric("tokens/s with padding", "{:,.0f}", "median"),
    "perf/model_tflops_per_gpu": Metric("TFLOP/s per GPU", "{:,.1f}", "median"),
    "perf/mfu_bf16": Metric("MFU of BF16 peak", "{:.1%}", "median", "MFU {:.1%}"),
    "perf/mfu_fp8": Metric("MFU of FP8 peak", "{:.1%}", "median", "FP8 MFU {:.1%}"),
    "perf/data_wait_share": Metric("data wait", "{:.2%}", "median"),
    "perf/peak_memory_gb": Metric("peak GB", "{:.1f}", "max", "{:.1f} GB"),
}
RATES = tuple(name for name, metric in METRICS.items() if metric.summary == "median")


def summary_name(metric: str) -> str:
    """Return a logged metric's name in summary.json."""
    return metric.removeprefix("perf/").replace("/", "_")


# Model types whose FLOPs `ModelShape` counts correctly: dense, gated MLPs, one LM head.
COUNTED = frozenset({*FAMILIES, "gemma", "gemma2", "granite", "olmo2", "phi3"})


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a dense decoder-only language model with gated MLPs (SwiGLU)."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    window: int | None = None  # sliding window of at least one layer, in tokens

    @classmethod
    def from_hf_config(cls, config: Any) -> ModelShape | None:
        """Read a transformers config. None if the model type is not in COUNTED."""
        if config.model_type not in COUNTED:
            return None
        kinds = getattr(config, "layer_types", None)
        slides = kinds is None or "sliding_attention" in kinds
        return cls(
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            ffn_hidden_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            window=getattr(config, "sliding_window", None) if slides else None,
        )

    def sees_all(self, length: int) -> bool:
        """True if attention covers a sequence of `length` tokens, as `attention_flops` assumes."""
        return self.window is None or self.window >= length

    @property
    def gemm_sizes(self) -> dict[str, int]:
        """Sizes of a layer's GEMM weights, by their names in error messages."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn_hidden_size,
            "query width": self.num_heads * self.head_dim,
            "key/value width": self.num_kv_heads * self.head_dim,
        }


def matmul_parameters(shape: ModelShape) -> int:
    """Count the weights in GEMMs: q, k, v, o, gate, up, down and LM head, tied or not.

    Embedding, norms and biases are not in GEMMs and do not count.
    """
    query_and_output = 2 * shape.hidden_size * shape.num_heads * shape.head_dim
    key_and_value = 2 * shape.hidden_size * shape.num_kv_heads * shape.head_dim
    mlp = 3 * shape.hidden_size * shape.ffn_hidden_size
    lm_head = shape.hidden_size * shape.vocab_size
    return shape.num_layers * (query_and_output + key_and_value + mlp) + lm_head


def gemm_flops(shape: ModelShape, tokens: int) -> float:
    """Forward and backward FLOPs of the weights' GEMMs: 6 per weight and token."""
    return 6.0 * matmul_parameters(shape) * tokens


def attention_flops(shape: ModelShape, sum_squared_lengths: int) -> float:
    """Forward and backward FLOPs of QK^T and PV in causal attention.

    Full attention takes 12 * layers * heads * head_dim * length^2; causal attention takes half.
    """
    return 6.0 * shape.num_layers * shape.num_heads * shape.head_dim * sum_squared_lengths


def model_flops(shape: ModelShape, *, tokens: int, sum_squared_lengths: int) -> float:
    """Forward and backward FLOPs over `tokens` tokens in independent causal sequences.

    `sum_squared_lengths` is the sum of length^2 over the sequences; each packed sample is a sequence of its
    own. Source: PaLM (arXiv:2204.02311), appendix B, 6N + 12LHQT per token, with N the weights in GEMMs and
    the causal half of the second term. Llama-3.1-8B at 8192 tokens: 51.47 GFLOP per token.
    """
    return gemm_flops(shape, tokens) + attention_flops(shape, sum_squared_lengths)


class Peak(NamedTuple):
    """Dense tensor-core peaks in TFLOP/s with FP32 accumulation; None: no such tensor cores."""

    bf16: float
    fp8: float | None


# A key matches if CUDA's device name contains all its words. The first match wins, so variants come before
# the plain name. Datasheet rates with sparsity are halved.
PEAK_TFLOPS: dict[str, Peak] = {
    "A100": Peak(312, None),  # NVIDIA A100 datasheet
    "A800": Peak(312, None),  # an A100 with slower NVLink
    "H100 PCIe": Peak(756, 1513),  # NVIDIA H100 datasheet, PCIe column
    "H100 NVL": Peak(835, 1671),  # NVIDIA H100 NVL datasheet, per GPU
    "H100": Peak(989, 1979),  # NVIDIA H100 datasheet, SXM column; "NVIDIA H100 80GB HBM3"
    "H800 PCIe": Peak(756, 1513),  # an H100 PCIe with slower NVLink
    "H800": Peak(989, 1979),  # an H100 SXM with slower NVLink
    "H200 NVL": Peak(835, 1671),  # NVIDIA H200 datasheet, NVL column
    "H200": Peak(989, 1979),  # NVIDIA H200 datasheet, SXM column
    "GH200": Peak(989, 1979),  # NVIDIA GH200 Grace Hopper Superchip datasheet
    "H20": Peak(148, 296),  # NVIDIA H20 product brief
    "B100": Peak(1750, 3500),  # NVIDIA Blackwell architecture brief, HGX B100 / 8
    "B200": Peak(2250, 4500),  # NVIDIA Blackwell architecture brief, HGX B200 / 8
    "GB200": Peak(2500, 5000),  # NVIDIA GB200 NVL72 datasheet / 72
    "B300": Peak(2250, 4500),  # NVIDIA HGX B300 datasheet / 8
    "GB300": Peak(2500, 5000),  # NVIDIA GB300 NVL72 datasheet / 72
    "L4": Peak(121, 242),  # NVIDIA L4 datasheet
    "L40": Peak(181, 362),  # NVIDIA L40 datasheet
    "L40S": Peak(362, 733),  # NVIDIA L40S datasheet
    "RTX 6000 Ada": Peak(364, 728),  # NVIDIA Ada professional GPU architecture whitepaper
    "RTX PRO 6000 Max Q": Peak(439, 878),  # NVIDIA RTX Blackwell PRO GPU architecture whitepaper
    "RTX PRO 6000": Peak(504, 1008),  # NVIDIA RTX Blackwell PRO GPU architecture whitepaper
    "RTX 4090": Peak(165.2, 330.3),  # NVIDIA Ada GPU architecture whitepaper, appendix A
    "RTX 5090": Peak(209.5, 419),  # NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A
}

# Words in names of MIG slices and cut-down variants, whose peaks are lower.
_LOWER_PEAK_VARIANTS = {"MIG", "LAPTOP", "D"}


def gpu_key(gpu_name: str) -> str | None:
    """Return the key in PEAK_TFLOPS of CUDA's device name, or None."""
    words = set(re.findall(r"\w+", gpu_name.upper()))
    if words & _LOWER_PEAK_VARIANTS:
        return None
    return next((key for key in PEAK_TFLOPS if words.issuperset(key.upper().split())), None)


def peak_tflops(gpu_name: str, precision: Literal["bf16", "fp8"]) -> float | None:
    """Return the dense peak of one GPU in TFLOP/s; None for an unknown GPU or an unsupported precision."""
    key = gpu_key(gpu_name)
    return getattr(PEAK_TFLOPS[key], precision) if key else None


def tail_mean(values: Sequence[float]) -> float:
    """Return the mean of the last 10 % of the values (at least one value)."""
    return fmean(values[-max(1, len(values) // 10) :])


def perplexity(loss: float) -> float:
    """Return exp(mean loss per token in nats); infinity on overflow."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
