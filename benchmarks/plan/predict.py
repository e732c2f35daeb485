"""Predict memory and step time of a run, and find flags that make it fit into GPU memory or faster."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from fp8_suite.benchmarks.plan.inputs import size_run
from fp8_suite.core.errors import UserError, bad_setting
from fp8_suite.core.gpus import Gpu
from fp8_suite.te_models.shape import model_flops
from fp8_suite.training.checkpoint.settings import parse_save_interval
from fp8_suite.training.config import Config, config_from_dict
from fp8_suite.training.estimate.advice import Changes, describe, ways_out
from fp8_suite.training.estimate.memory import checkpoint_bytes, peak
from fp8_suite.training.estimate.setup import TrainingSetup
from fp8_suite.training.estimate.sizes import Sizing, for_tensors
from fp8_suite.training.estimate.step_time import step_seconds
from fp8_suite.training.estimate.transfers import NETWORK_BANDWIDTH

FASTER = 1.03  # gain in speed from which settings are suggested


@dataclass(frozen=True)
class Plan:
    """Prediction for a run: bytes per GPU and seconds per step, by part."""

    sizing: Sizing
    network_gbs: float
    memory: dict[str, float]
    seconds: dict[str, float]
    disk_gbs: float | None = None  # rate of writing checkpoints; None: saves take no time

    @property
    def setup(self) -> TrainingSetup:
        return self.sizing.chosen

    @property
    def peak(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.sizing.fits

    @property
    def step(self) -> float:
        return sum(self.seconds.values())

    @property
    def largest_batch(self) -> int:
        """Largest micro-batch that fits; 0 if a sequence is too long."""

        def exceeds(batch: int) -> bool:
            cfg = replace(self.setup.cfg, optim=replace(self.setup.cfg.optim, batch_size=batch))
            return sum(peak(replace(self.setup, cfg=cfg)).values()) > for_tensors(self.sizing.free)

        return bisect_left(range(1, 2**20), True, key=exceeds)

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all GPUs."""
        return self.setup.step_tokens / self.step

    @property
    def tflops(self) -> float:
        """Model TFLOP/s per GPU."""
        tokens = self.setup.step_tokens / self.setup.gpus
        length = self.setup.cfg.data.max_seq_length
        model, pairs = self.setup.model, tokens * length
        flops = model_flops(model.shape, tokens=tokens, sum_squared_lengths=pairs, adapters=model.adapters)
        return flops / self.step / 1e12

    @property
    def save_seconds(self) -> float:
        """Time to write a checkpoint."""
        return checkpoint_bytes(self.setup) / 1e9 / self.disk_gbs if self.disk_gbs else 0.0

    @property
    def goodput(self) -> float:
        """Share of wall time in steps: training waits for synchronous saves, and for a save still pending."""
        checkpoint = self.setup.cfg.checkpoint
        steps, interval = parse_save_interval(checkpoint.save_interval)
        if not (steps or interval):
            return 1.0
        training = steps * self.step or max(interval, self.step)  # between two saves
        blocked = max(self.save_seconds - training, 0.0) if checkpoint.async_save else self.save_seconds
        return training / (training + blocked)

    def days(self, tokens: float) -> float:
        return tokens / (self.tokens_per_second * self.goodput * 86_400)


def make_plan(
    cfg: Config,
    gpu: Gpu,
    *,
    gpus: int,
    gpus_per_node: int = 8,
    network_gbs: float = NETWORK_BANDWIDTH / 1e9,
    disk_gbs: float | None = None,
) -> Plan:
    """Predict a run on `gpus` GPUs. UserError for settings that the planner or training refuses."""
    if limit := cfg.sharding.memory_limit_gb:
        if limit > gpu.memory_gb:
            reason = f"the GPU has {gpu.memory_gb:g} GB; give less, or drop it"
            raise bad_setting(reason, memory_limit_gb=limit)
        gpu = gpu._replace(memory_gb=limit)
    sizing = size_run(cfg, gpu=gpu, gpus=gpus, gpus_per_node=gpus_per_node)
    seconds = step_seconds(sizing.chosen, gpu, network=network_gbs * 1e9)
    return Plan(sizing, network_gbs, peak(sizing.chosen), seconds, disk_gbs)


def alternatives(plan: Plan) -> dict[str, Plan]:
    """Return what makes a plan fit, or one that fits faster: the first way out, and the fastest, by flags."""
    enough = FASTER * plan.tokens_per_second if plan.fits else 0.0
    candidates = {
        describe(plan.sizing.requested, changes): changed_plan(plan, changes)
        for changes in ways_out(plan.sizing)
    }
    plans = {flags: p for flags, p in candidates.items() if p and p.tokens_per_second > enough}
    if not plans:
        return {}
    first, fastest = next(iter(plans)), max(plans, key=lambda flags: plans[flags].tokens_per_second)
    worthwhile = plans[fastest].tokens_per_second > FASTER * plans[first].tokens_per_second
    return {flags: plans[flags] for flags in dict.fromkeys([first, fastest] if worthwhile else [first])}


def changed_plan(plan: Plan, changes: Changes, gpu: Gpu | None = None) -> Plan | None:
    """Return the plan with other settings or another GPU; None if it is refused or does not fit."""
    try:
        cfg = config_from_dict(plan.sizing.requested.cfg.to_dict() | changes)
        cluster = {"gpus": plan.setup.gpus, "gpus_per_node": plan.setup.gpus_per_node}
        candidate = make_plan(cfg, gpu or plan.sizing.gpu, **cluster, network_gbs=plan.network_gbs)
    except UserError:
        return None
    return candidate if candidate.fits else None
