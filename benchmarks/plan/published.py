"""Compare the planner's predictions with published runs on more GPUs than any recorded run has."""

from __future__ import annotations

from dataclasses import dataclass

from fp8_suite.benchmarks.plan.predict import Plan, make_plan
from fp8_suite.benchmarks.report.tables import markdown
from fp8_suite.core.gpus import PLANNED
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.estimate.layout import Layout

_405B, _70B, _8B = (f"meta-llama/Llama-3.1-{size}" for size in ("405B", "70B", "8B"))
_FP8 = {"mixed_precision": "fp8", "fp8_scenario": "current"}
# torchtitan's layers are Hugging Face's with torchao's FP8, and recompute whole layers.
_TORCHAO = {"use_te": False, "mixed_precision": "fp8", "fp8_scenario": "tensorwise", "recompute": "layer"}


@dataclass(frozen=True)
class PublishedRun:
    """A run on H100 GPUs of 80 GB: layout, settings, and its model TFLOP/s per GPU."""

    name: str
    gpus: int
    layout: Layout
    tflops: float
    settings: dict

    def plan(self) -> Plan:
        """Predict the run. Recomputation is the least that fits; attention is cuDNN's."""
        defaults = {"use_te": True, "batch_size": 1, "max_seq_length": 8192, "recompute": "auto"}
        defaults |= {"mixed_precision": "bf16", "sharding_mode": "fsdp_grad", "flash_attention": False}
        cfg = config_from_dict(defaults | self.settings)
        return make_plan(cfg, PLANNED["H100"], gpus=self.gpus, layout=self.layout)


# Llama 3: arXiv:2407.21783, table 4. A stage is a layer: 126 layers in 16 x 8 stages, of which the first and
# the last are the embedding and the head. Weights are gathered once per step (section 3.3.2).
# Megatron-Bridge: its docs/performance-summary.md (26.02 for the 70B, 25.11 for the 405B), DGX H100.
# torchtitan: its benchmarks/llama3_h100_202412_torchtitan.md, table 2, 1,071 tokens/s; 500 W, 2.4 TB/s.
PUBLISHED = (
    PublishedRun(
        *("Llama 3, 8k", 8192, Layout(tp=8, pp=16, virtual=8), 430),
        {"model_name": _405B, "global_batch_size": 64 * 32},
    ),
    PublishedRun(
        *("Llama 3, 8k", 16384, Layout(tp=8, pp=16, virtual=8), 400),
        {"model_name": _405B, "global_batch_size": 128 * 16},
    ),
    PublishedRun(
        *("Llama 3, 128k", 16384, Layout(cp=16, tp=8, pp=16, virtual=8), 380),
        {"model_name": _405B, "global_batch_size": 8 * 16, "max_seq_length": 131072},
    ),
    PublishedRun(
        *("Megatron-Bridge, 70B FP8", 64, Layout(tp=4, pp=8, virtual=5), 736),
        {"model_name": _70B, "global_batch_size": 256} | _FP8,
    ),
    PublishedRun(
        *("Megatron-Bridge, 405B FP8", 1024, Layout(cp=2, tp=8, pp=8, virtual=8), 737),
        {"model_name": _405B, "global_batch_size": 512} | _FP8,
    ),
    PublishedRun(
        *("torchtitan, 8B FP8, 128k", 8, Layout(cp=4), 159),
        {"model_name": _8B, "max_seq_length": 131072, "sharding_mode": "fsdp_full"} | _TORCHAO,
    ),
)


def published_table() -> str:
    """Return a table of published and predicted TFLOP/s per GPU."""
    headings = ["published run", "H100", "CP x TP x PP (stages per rank)", "TFLOP/s", "predicted", "error"]
    rows = []
    for run in PUBLISHED:
        layout, predicted = run.layout, run.plan().tflops
        sizes = f"{layout.cp} x {layout.tp} x {layout.pp} ({layout.virtual})"
        error = f"{predicted / run.tflops - 1:+.1%}"
        rows.append([run.name, f"{run.gpus:,}", sizes, f"{run.tflops:.0f}", f"{predicted:.0f}", error])
    return markdown(headings, rows)
