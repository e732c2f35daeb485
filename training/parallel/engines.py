"""The strategy of each engine."""

from __future__ import annotations

import torch
from fp8_suite.training.config import Config
from fp8_suite.training.parallel.fsdp import FSDP
from fp8_suite.training.parallel.pipeline import PipelineDDP, PipelineFSDP
from fp8_suite.training.parallel.settings import MODES
from fp8_suite.training.parallel.strategies import DDP, Strategy
from fp8_suite.training.parallel.zero import Zero

ENGINES: dict[str, type[Strategy]] = {"none": Strategy, "ddp": DDP, "fsdp": FSDP, "zero": Zero}
PIPELINE_ENGINES: dict[str, type[Strategy]] = {"ddp": PipelineDDP, "fsdp": PipelineFSDP}


def build_strategy(mode: str, device: torch.device, cfg: Config) -> Strategy:
    """Build the strategy of a sharding mode. Collective."""
    if cfg.sharding.pipeline_parallel_size > 1:
        return PIPELINE_ENGINES[MODES[mode].engine](mode, device, cfg)
    return ENGINES[MODES[mode].engine](mode, device, cfg)
