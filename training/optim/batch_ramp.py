"""Batch of every step: one size for the whole run, or the phases of --batch_ramp.

Tokens are those of sequences at full length, with padding: --batch_size x --max_seq_length x data-parallel
ranks x accumulation, as in `benchmarks.plan`. An epoch's last step may have fewer micro-batches, but counts
in full. The tokens seen before a step thus follow from its number alone, on any number of ranks, and a resume
needs no other state. This module must not import torch.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from fp8_suite.core.errors import bad_setting, counted
from fp8_suite.training.config import Config
from fp8_suite.training.optim.settings import parse_batch_ramp


@dataclass(frozen=True)
class Phase:
    """Steps with batches of one size."""

    first_step: int  # 0-based
    seen: int  # tokens of all steps before
    tokens: int  # per step, over all ranks


@dataclass(frozen=True)
class BatchSchedule:
    """Phases of a run; one without --batch_ramp."""

    micro_batch: int  # tokens of a micro-batch over all ranks
    phases: tuple[Phase, ...]

    @classmethod
    def of(cls, cfg: Config, ranks: int) -> BatchSchedule:
        """Build the schedule of settings without `auto` on this number of data-parallel ranks."""
        optim, phases = cfg.optim, []
        micro_batch = optim.batch_size * cfg.data.max_seq_length * ranks
        fixed = (micro_batch * optim.gradient_accumulation_steps, 0)
        step = seen = 0
        for tokens, start in parse_batch_ramp(optim.batch_ramp) if optim.batch_ramp else (fixed,):
            if phases:
                steps = max(0, -(-(start - seen) // phases[-1].tokens))
                step, seen = step + steps, seen + steps * phases[-1].tokens
            phases.append(Phase(step, seen, tokens))
        return cls(micro_batch, tuple(phases))

    @property
    def is_ramp(self) -> bool:
        return len(self.phases) > 1

    def phase(self, step: int) -> Phase:
        """Return the phase of a 0-based step."""
        return self.phases[bisect_right(self.phases, step, key=lambda phase: phase.first_step) - 1]

    def micro_batches(self, step: int) -> int:
        """Return the micro-batches per rank of a 0-based step."""
        return self.phase(step).tokens // self.micro_batch

    def position(self, step: int) -> int:
        """Return how far the run is before a 0-based step: in tokens seen with a ramp, else in steps."""
        phase = self.phase(step)
        return phase.seen + (step - phase.first_step) * phase.tokens if self.is_ramp else step

    def steps_after(self, step: int, micro_batches: int, epochs: int) -> int:
        """Return the number of steps done when `step` steps are followed by epochs of these micro-batches."""
        for epoch in range(epochs):
            if step >= self.phases[-1].first_step:
                return step + (epochs - epoch) * -(-micro_batches // self.micro_batches(step))
            left = micro_batches
            while left > 0:
                left -= self.micro_batches(step)
                step += 1
        return step

    def metrics(self, done: int) -> dict[str, float]:
        """Return what is logged after `done` steps; nothing without a ramp."""
        if not self.is_ramp:
            return {}
        tokens = self.phase(max(0, done - 1)).tokens
        return {"train/tokens_per_step": tokens, "train/tokens_seen": self.position(done)}

    def describe_ramp(self) -> str:
        """Return the batch of each phase and its first step, counted from 1."""
        phases = (f"{phase.tokens:,} from step {phase.first_step + 1:,}" for phase in self.phases)
        return f"tokens per step: {', '.join(phases)}"

    def describe(self) -> str:
        """Return the micro-batches per step, such as "1 to 4 micro-batches"."""
        first, last = (self.micro_batches(phase.first_step) for phase in (self.phases[0], self.phases[-1]))
        ramp = f"{first:,} to " if self.is_ramp else ""
        return f"{ramp}{last:,} micro-batch{'es' * (last > 1)}"


def ramp_sequences(cfg: Config, batch: int, ranks: int) -> list[int]:
    """Return the sequences per step of each phase of --batch_ramp.

    UserError if micro-batches of `batch` sequences per rank do not divide them.
    """
    length, ramp = cfg.data.max_seq_length, cfg.optim.batch_ramp
    sizes, unit = [tokens for tokens, _ in parse_batch_ramp(ramp)], batch * length * ranks
    if any(size % unit for size in sizes):
        micro_batch = f"{batch} x {length} tokens on {counted(ranks, 'rank')}"
        fitting = [n for n in range(1, batch) if not any(size % (n * length * ranks) for size in sizes)]
        way_out = f"--batch_size {fitting[-1]}" if fitting else "such, or units of 1024: Ki, Mi"
        reason = f"tokens per step must be multiples of {unit:,} ({micro_batch}); use {way_out}"
        raise bad_setting(reason, batch_ramp=ramp)
    return [size // length for size in sizes]
