"""Predict memory and step time of a job, and find flags that make it fit into GPU memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fp8_suite.benchmarks.plan.job import build_job
from fp8_suite.core.errors import UserError, bad_setting
from fp8_suite.core.gpus import Gpu
from fp8_suite.core.settings import AUTO
from fp8_suite.te_models.shape import model_flops
from fp8_suite.training.config import Config, config_from_dict
from fp8_suite.training.estimate.activations import host_activations
from fp8_suite.training.estimate.advice import MEMORY_SAVING, Settings, combined, without
from fp8_suite.training.estimate.memory import host_state, peak
from fp8_suite.training.estimate.setup import TrainingSetup
from fp8_suite.training.estimate.sizes import Sizing, global_batch, room
from fp8_suite.training.estimate.step_time import NETWORK_BANDWIDTH, step_seconds

# Flags that reduce memory, and their settings. --batch_size is then raised to the largest that fits.
SMALLER_BATCH, RECOMPUTE = "--batch_size", "--recompute"
SMALLER: Settings = {
    SMALLER_BATCH: {"batch_size": 1},
    RECOMPUTE: {"recompute": AUTO, "gradient_checkpointing": False},
    "--sharding_mode fsdp_full": {
        "sharding_mode": "fsdp_full",
        "hsdp_shard_size": None,
        "fp8_weights": False,
    },
    **MEMORY_SAVING,
}


FASTER = 1.03  # gain in speed from which a flag is suggested


@dataclass(frozen=True)
class Plan:
    """Prediction for a job: bytes per GPU and seconds per step, by part."""

    sizing: Sizing
    gpu: Gpu
    network_gbs: float
    memory: dict[str, float]
    seconds: dict[str, float]
    refusal: str | None  # why training would refuse the mode that `auto` chooses

    @property
    def job(self) -> TrainingSetup:
        return self.sizing.chosen

    @property
    def peak(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.sizing.fits

    @property
    def offloads(self) -> bool:
        """True if training state or activations are in host memory."""
        return self.job.offloads_state or self.job.cfg.model.offload_activations

    @property
    def step(self) -> float:
        return sum(self.seconds.values())

    @property
    def largest_batch(self) -> int:
        return largest_batch(self.job, room(1e9 * self.gpu.memory_gb))

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all GPUs."""
        return self.job.tokens * self.job.accumulation * self.job.gpus / self.step

    @property
    def tflops(self) -> float:
        """Model TFLOP/s per GPU."""
        tokens, length = self.job.tokens * self.job.accumulation, self.job.cfg.data.max_seq_length
        flops = model_flops(self.job.model.shape, tokens=tokens, sum_squared_lengths=tokens * length)
        return flops / self.step / 1e12

    def days(self, tokens: float) -> float:
        return tokens / (self.tokens_per_second * 86_400)

    def host_gb(self) -> tuple[float, float]:
        """Host memory per node in GB: always, and in addition while saving a checkpoint."""
        job = self.job
        kept, saving = host_state(job) if job.offloads_state else (0.0, 0)
        each = job.model.parameters / job.nodes / 1e9
        return kept * each + host_activations(job) / 1e9, saving * each


def make_plan(
    cfg: Config, gpu: Gpu, *, gpus: int, gpus_per_node: int = 8, network_gbs: float = NETWORK_BANDWIDTH / 1e9
) -> Plan:
    """Predict a run on `gpus` GPUs. UserError for settings that the planner or training refuses."""
    if limit := cfg.sharding.memory_limit_gb:
        if limit > gpu.memory_gb:
            reason = f"the GPU has {gpu.memory_gb:g} GB; give less, or drop it"
            raise bad_setting(reason, memory_limit_gb=limit)
        gpu = gpu._replace(memory_gb=limit)
    found, refusal = build_job(cfg, gpu=gpu, gpus=gpus, gpus_per_node=gpus_per_node)
    job = found.chosen
    return Plan(
        found, gpu, network_gbs, peak(job), step_seconds(job, gpu, network=network_gbs * 1e9), refusal
    )


def replan(plan: Plan, settings: dict[str, Any]) -> Plan:
    """Predict other settings on the same GPUs."""
    job = plan.job
    return make_plan(
        config_from_dict(settings),
        plan.gpu,
        gpus=job.gpus,
        gpus_per_node=job.gpus_per_node,
        network_gbs=plan.network_gbs,
    )


def largest_batch(job: TrainingSetup, room: float) -> int:
    """Return the largest micro-batch with a peak of at most `room` bytes; 0 if a sequence is too long."""

    def fits(batch: int) -> bool:
        cfg = replace(job.cfg, optim=replace(job.cfg.optim, batch_size=batch))
        return sum(peak(replace(job, cfg=cfg)).values()) <= room

    low, high = 0, 1
    while fits(high) and high < 2**20:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def fewest_changes(plan: Plan) -> dict[str, Plan]:
    """Return plans that fit, by the flags to add: those with as few as possible, and a faster pair of flags.

    {} if nothing fits.
    """
    settings = plan.sizing.requested.cfg.to_dict()
    for count in range(1, len(SMALLER) + 1):
        found = {}
        for flags, changes in combined(SMALLER, count).items():
            changed = settings | changes
            other = _fitting(plan, changed)
            if other and SMALLER_BATCH in flags:
                largest = AUTO if settings["global_batch_size"] else other.largest_batch
                other = _fitting(plan, changed | {"batch_size": largest})
            if other:
                chosen = {
                    SMALLER_BATCH: other.job.cfg.optim.batch_size,
                    RECOMPUTE: other.job.cfg.model.recompute,
                }
                shown = " ".join(f"{flag} {chosen[flag]}" if flag in chosen else flag for flag in flags)
                found[shown + _dropped(plan, other)] = other
        if found:
            return found | (_faster_pair(plan, [*found.values()]) if count == 1 else {})
    return {}


def faster_settings(plan: Plan) -> dict[str, Plan]:
    """Return faster plans by the flags to add: with one flag, and with a pair that is faster still."""
    enough, others = FASTER * plan.tokens_per_second, _saving_memory(plan, 1)
    faster = {flag: other for flag, other in others.items() if other.tokens_per_second > enough}
    return faster | _faster_pair(plan, [plan, *faster.values()])


def _faster_pair(plan: Plan, others: list[Plan]) -> dict[str, Plan]:
    """Return the fastest plan with two memory-saving flags, by these; {} if one of `others` is as fast."""
    enough = FASTER * max(other.tokens_per_second for other in others)
    pairs = _saving_memory(plan, 2)
    fastest = max(pairs, key=lambda flags: pairs[flags].tokens_per_second, default=None)
    return {fastest: pairs[fastest]} if fastest and pairs[fastest].tokens_per_second > enough else {}


def _saving_memory(plan: Plan, count: int) -> dict[str, Plan]:
    """Return the plans with `count` memory-saving flags that fit, by these."""
    settings, ways = plan.sizing.requested.cfg.to_dict(), combined(MEMORY_SAVING, count)
    others = {" ".join(flags): _fitting(plan, settings | changes) for flags, changes in ways.items()}
    return {flags: other for flags, other in others.items() if other}


def _dropped(plan: Plan, other: Plan) -> str:
    """Return what else changes from `plan` to `other`: dropped flags, the command, sequences per step."""
    before, after = plan.sizing.requested.cfg.to_dict(), other.job.cfg.to_dict()
    names = "hsdp_shard_size", "gradient_checkpointing", "offload_optimizer", "fp8_weights"
    text = without([name for name in names if before[name] and not after[name]])
    if other.job.sharding.offload and other.job.gpus == 1:
        text += ", with torchrun --nproc_per_node=1 train_multi_gpu.py"
    sequences = [global_batch(job.cfg.optim, plan.job.gpus) for job in (plan.job, other.job)]
    return text + (f", {sequences[1]:,} sequences per step" if sequences[0] != sequences[1] else "")


def _fitting(plan: Plan, settings: dict[str, Any]) -> Plan | None:
    """Return the plan with these settings; None if they are refused or do not fit."""
    try:
        other = replan(plan, settings)
    except UserError:
        return None
    return other if other.fits and not other.refusal else None
