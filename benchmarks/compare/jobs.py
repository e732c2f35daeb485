"""Jobs of a comparison: every variant with one seed, then repetitions with other seeds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8_suite.benchmarks.records.launch import is_begun, is_finished
from fp8_suite.benchmarks.records.runs import bad_input, read_run
from fp8_suite.benchmarks.records.variants import Variant, resolve
from fp8_suite.core.errors import UserError, bad_setting, counted
from fp8_suite.training.config import Config
from fp8_suite.training.estimate.sizes import check_launch, global_batch
from fp8_suite.training.launch import require_inputs

# Defaults of the runs; training flags on the command line override them.
DEFAULTS: dict[str, Any] = {
    "eval_at_start": True,  # shows whether all runs start from the same weights
    "eval_interval": 0,
    "log_interval": 1,  # gaps average logged losses
    "export": False,
    "keep_last": 1,
}


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    name: str
    cfg: Config
    against: str | None = None  # name of its baseline; None for the reference
    seed_of: str | None = None  # name of the variant that this job repeats with another seed

    @property
    def folder(self) -> Path:
        return Path(self.cfg.checkpoint.output_dir)


def build_jobs(
    variants: list[Variant], given: dict[str, Any], folder: Path, noise_seeds: int, paired_seeds: int = 0
) -> list[Job]:
    """Return the jobs, the reference first. UserError without a reference, or for conflicting settings.

    `noise_seeds` further seeds repeat the reference, `paired_seeds` every variant. A variant and its baseline
    always have the same seed.
    """
    by_name = {variant.name: variant for variant in variants}
    against = {name: _baseline(variant, by_name) for name, variant in by_name.items()}
    reference = next(name for name in against if against[name] is None)
    ordered = [reference, *(name for name in by_name if name != reference)]

    def job(name: str, seed: int | None = None) -> Job:
        variant, suffix = by_name[name], "" if seed is None else f"-seed{seed}"
        own = variant.settings if seed is None else variant.settings | {"seed": seed}
        try:
            cfg = resolve(DEFAULTS | given | own, folder / "runs" / f"{variant.folder_name}{suffix}")
        except UserError as error:
            raise bad_input(f"variant {name}: {error}") from None
        baseline = against[name] and against[name] + suffix
        return Job(name + suffix, cfg, baseline, None if seed is None else name)

    jobs = [job(name) for name in ordered]
    first = jobs[0].cfg.optim.seed
    for seed in range(first + 1, first + 1 + max(noise_seeds, paired_seeds)):
        jobs += [job(name, seed) for name in (ordered if seed <= first + paired_seeds else [reference])]
    return jobs


def _baseline(variant: Variant, by_name: dict[str, Variant]) -> str | None:
    """Return the BF16 variant with the variant's layers, else the other one; None for the reference."""
    if variant.name == "bf16" or (variant.name == "bf16_hf" and "bf16" not in by_name):
        return None
    order = ("bf16", "bf16_hf")
    preferred = order if variant.uses_te or variant.name == "bf16_hf" else order[::-1]
    found = next((name for name in preferred if name in by_name), None)
    if found is None:
        names = ",".join(by_name)
        raise bad_setting("needs bf16 or bf16_hf, without settings, as the reference", variants=names)
    return found


def check_before_start(jobs: list[Job], gpus: int) -> None:
    """Raise UserError if results would be incomparable, or if a run lacks its model or data."""
    first = jobs[0]
    batch = global_batch(first.cfg.optim, gpus)
    for job in jobs:
        check_launch(job.cfg, gpus)
        if (own := global_batch(job.cfg.optim, gpus)) != batch:
            raise bad_input(
                f"{job.name} and {first.name} cannot be compared: --batch_size x "
                f"--gradient_accumulation_steps x ranks is {own} and {batch}; choose equal products, or "
                "--global_batch_size"
            )
        if is_begun(job.cfg) and (run := read_run(job.folder)).environment and run.ranks != gpus:
            reason = (
                f"{run.folder} holds a run on {counted(run.ranks, 'GPU')}; use as many, or another folder"
            )
            raise bad_setting(reason, gpus=gpus)
        if not is_finished(job.cfg):
            require_inputs(job.cfg)
