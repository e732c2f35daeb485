"""Search of the fastest layout for a model, a sequence length and a number of GPUs.

Training and the planner choose by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from fp8_suite.core.errors import UserError, bad_setting, counted
from fp8_suite.core.gpus import Gpu
from fp8_suite.core.settings import AUTO
from fp8_suite.training.config import Config
from fp8_suite.training.estimate import sizes
from fp8_suite.training.estimate.layout import SHORTEST_PART, Layout, check_layout, check_pipeline
from fp8_suite.training.estimate.memory import peak, resident_state
from fp8_suite.training.estimate.modes import make_setup
from fp8_suite.training.estimate.setup import ModelSize, TrainingSetup, rank_setups
from fp8_suite.training.estimate.sizes import Sizing
from fp8_suite.training.estimate.step_time import step_seconds
from fp8_suite.training.estimate.transfers import NETWORK_BANDWIDTH
from fp8_suite.training.parallel.settings import AXES

MODES_TRIED = ("ddp", "fsdp_grad", "hsdp", "fsdp_full")
FULL = 8192  # tokens of a micro-batch from which GEMMs fill a GPU


@dataclass(frozen=True)
class LayoutSearch:
    """A model, and the GPUs that may train it."""

    model: ModelSize
    gpus: int
    gpus_per_node: int
    gpu: Gpu
    free: float  # bytes of a GPU's memory
    searched: dict[str, str | bool]  # settings that ask for the search, at fault if it finds nothing
    check: Callable[[Config], None]  # raises UserError for sizes that the model cannot run with
    network: float = NETWORK_BANDWIDTH  # bytes/s per GPU between nodes
    effective: str | None = None  # precision that runs; None: the requested one

    def seconds(self, setup: TrainingSetup) -> float:
        """Return the predicted time of a step."""
        return sum(step_seconds(setup, self.gpu, network=self.network).values())

    def fastest(self, cfg: Config, number: int = 1) -> list[Sizing]:
        """Return the fastest CP x TP x PP that fit, by branch and bound over stages per rank and modes.

        `requested` has the layout and the mode in place of `auto`. The bound is the time without
        recomputation. Only the last choice tries all sizes of micro-batches.
        UserError without a global batch; empty if none fits, see `misfit`.
        """
        if cfg.optim.global_batch_size is None and not cfg.optim.batch_ramp:
            reason = "layouts have different numbers of data ranks; add --global_batch_size"
            raise bad_setting(reason, **self.searched)
        fitting = [setup for setup in self.setups(cfg) if resident_state(setup) < self.free]
        timed = [(self.seconds(setup), setup) for setup in fitting]
        fastest: dict[tuple[int, ...], tuple[float, Sizing]] = {}  # by CP, TP and PP
        for bound, setup in sorted(timed, key=lambda pair: pair[0]):
            steps = sorted(seconds for seconds, _ in fastest.values())
            if len(steps) >= number and bound > steps[number - 1]:
                break
            key = (setup.layout.cp, setup.layout.tp, setup.layout.pp)
            known = fastest[key][0] if key in fastest else math.inf
            if bound < known and _least_memory(setup, cfg) <= sizes.for_tensors(self.free):
                with_batch = replace(cfg, sharding=setup.cfg.sharding, optim=setup.cfg.optim)
                sizing = sizes.choose_sizes(replace(setup, cfg=with_batch), self.free, self.gpu)
                if sizing.fits and (step := self.seconds(sizing.chosen)) < known:
                    fastest[key] = step, sizing
        ranked = sorted(fastest.values(), key=lambda pair: pair[0])[:number]
        changed = ((best.requested, replace(best.requested.cfg, optim=cfg.optim)) for _, best in ranked)
        sizings = (sizes.choose_sizes(replace(setup, cfg=cfg), self.free, self.gpu) for setup, cfg in changed)
        return sorted(sizings, key=lambda sizing: self.seconds(sizing.chosen))

    def misfit(self) -> UserError:
        """Return the error of settings with which no layout fits."""
        way_out = "use --batch_size auto --recompute auto, or more GPUs"
        return bad_setting(f"no layout on {counted(self.gpus, 'GPU')} fits; {way_out}", **self.searched)

    def setups(self, cfg: Config) -> Iterator[TrainingSetup]:
        """Yield setups for each layout and mode: with micro-batches of FULL tokens, and with the smallest."""
        modes = MODES_TRIED if (mode := cfg.sharding.sharding_mode) == AUTO else (mode,)
        for layout, mode in product(self._layouts(cfg), modes):
            try:
                changed = replace(cfg, sharding=replace(cfg.sharding, **layout, sharding_mode=mode))
                self.check(changed)
                args = (self.model, mode, self.gpus, self.gpus_per_node, self.free)
                request, _ = make_setup(changed, *args, effective=self.effective)
                batches, rank = sizes.runnable_batches(request), rank_setups(request)[0]
                if mode == "hsdp" and rank.shards in (1, rank.gpus):  # the same as another mode
                    continue
                length = cfg.data.max_seq_length // request.layout.cp
                full = next((size for size in batches if size * length <= FULL), batches[-1])
                for batch in {full, batches[-1]}:
                    setup = replace(request, cfg=sizes.with_sizes(changed, request.data_ranks, batch))
                    check_pipeline(setup.layout, self.model.shape.num_layers, setup.batches.micro_batches(0))
                    yield setup
            except UserError:
                continue

    def _layouts(self, cfg: Config) -> Iterator[dict[str, int]]:
        """Yield sizes in place of `auto`, and stages of a pipeline, that divide model, sequences and GPUs."""
        shape, length, sharding = self.model.shape, cfg.data.max_seq_length, cfg.sharding
        divisors = [size for size in range(1, self.gpus + 1) if self.gpus % size == 0]
        fixed = {name: size for name in AXES.values() if (size := getattr(sharding, name)) != AUTO}
        for layout in product(*([fixed[name]] if name in fixed else divisors for name in AXES.values())):
            cp, tp, pp = layout
            too_short = cp > max(1, length // SHORTEST_PART) and "context_parallel_size" not in fixed
            if too_short or self.gpus % (cp * tp * pp):
                continue
            stages = {sharding.virtual_stages}
            if stages == {1} and pp > 1 and "pipeline_parallel_size" not in fixed:
                stages = range(1, shape.num_layers // pp + 1)
            for virtual in stages:
                with suppress(UserError):
                    check_layout(Layout(cp, tp, pp, virtual), shape, self.gpus_per_node, length)
                    yield dict(zip((*AXES.values(), "virtual_stages"), (*layout, virtual), strict=True))


def _least_memory(setup: TrainingSetup, cfg: Config) -> float:
    """Return the peak bytes with the most recomputation that the settings `cfg` allow."""
    level = ("full" if cfg.model.use_te else "layer") if cfg.model.recompute == AUTO else cfg.model.recompute
    model = replace(setup.cfg.model, recompute=level)
    return sum(peak(replace(setup, cfg=replace(setup.cfg, model=model))).values())
