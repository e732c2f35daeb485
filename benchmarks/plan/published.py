"""Compare the planner's predictions with published runs on more GPUs than any recorded run has."""

from __future__ import annotations

from dataclasses import dataclass, field

from fp8_suite.benchmarks.plan.predict import Plan, make_plan
from fp8_suite.benchmarks.report.tables import markdown
from fp8_suite.core.gpus import PLANNED
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.estimate.layout import Layout

_FP8 = {"mixed_precision": "fp8", "fp8_scenario": "current"}


@dataclass(frozen=True)
class PublishedRun:
    """A run on H100 GPUs of 80 GB, with its model TFLOP/s per GPU."""

    name: str
    gpus: int
    layout: Layout
    tflops: float
    model: str
    sequences: int  # per step
    settings: dict = field(default_factory=dict)

    def plan(self) -> Plan:
        """Predict the run. Unless set, recomputation is the least that fits; attention is cuDNN's."""
        settings = {"use_te": True, "batch_size": 1, "max_seq_length": 8192, "recompute": "auto"}
        settings |= {"mixed_precision": "bf16", "sharding_mode": "fsdp_grad", "flash_attention": False}
        settings |= {"model_name": f"meta-llama/Llama-3.1-{self.model}", "global_batch_size": self.sequences}
        cfg = config_from_dict(settings | self.layout.flags | self.settings)
        return make_plan(cfg, PLANNED["H100"], gpus=self.gpus)


# Llama 3: arXiv:2407.21783, table 4. A stage is a layer: 126 layers in 16 x 8 stages, of which the first and
# the last are the embedding and the head. Weights are gathered once per step (section 3.3.2).
# Megatron-Bridge: its docs/performance-summary.md (26.02 for the 70B, 25.11 for the 405B), DGX H100. Its
# scripts/performance/configs/llama recompute nothing; with torch's pipelines that would not fit, see
# `activations.between_stages`.
# torchtitan: its benchmarks/llama3_h100_202412_torchtitan.md, table 2, 1,071 tokens/s; 500 W, 2.4 TB/s,
# torchao's FP8.
_LONG = {"max_seq_length": 131072}
_MEGATRON = _FP8 | {"recompute": "none"}
_TORCHTITAN = {"sharding_mode": "fsdp_full", "recompute": "full"}
PUBLISHED = (
    PublishedRun("Llama 3, 8k", 8192, Layout(1, 8, 16, 8), 430, "405B", 64 * 32),
    PublishedRun("Llama 3, 8k", 16384, Layout(1, 8, 16, 8), 400, "405B", 128 * 16),
    PublishedRun("Llama 3, 128k", 16384, Layout(16, 8, 16, 8), 380, "405B", 8 * 16, _LONG),
    PublishedRun("Megatron-Bridge, 70B FP8", 64, Layout(1, 4, 8, 5), 736, "70B", 256, _MEGATRON),
    PublishedRun("Megatron-Bridge, 405B FP8", 1024, Layout(2, 8, 8, 8), 737, "405B", 512, _MEGATRON),
    PublishedRun("torchtitan, 8B FP8, 128k", 8, Layout(4), 159, "8B", 2, _LONG | _TORCHTITAN | _FP8),
)


def published_table() -> str:
    """Return a table of published and predicted TFLOP/s per GPU."""
    headings = ["published run", "H100", "CP x TP x PP (stages per rank)", "TFLOP/s", "predicted", "error"]
    rows = []
    for run in PUBLISHED:
        layout, predicted = run.layout, run.plan().tflops
        sizes = f"{layout.cp} x {layout.tp} x {layout.pp} ({layout.virtual})"
        rates = f"{run.tflops:.0f}", f"{predicted:.0f}", f"{predicted / run.tflops - 1:+.1%}"
        rows.append([run.name, f"{run.gpus:,}", sizes, *rates])
    return markdown(headings, rows)
