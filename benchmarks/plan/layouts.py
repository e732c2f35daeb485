"""Find the fastest layout for a model, a sequence length and a number of GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product

from fp8_suite.benchmarks.plan.inputs import read_model, refuse_gemm_sizes
from fp8_suite.benchmarks.plan.predict import Plan, make_plan
from fp8_suite.benchmarks.report.tables import markdown
from fp8_suite.core.errors import UserError, as_flag, bad_setting, counted
from fp8_suite.core.gpus import Gpu
from fp8_suite.core.settings import AUTO
from fp8_suite.training.config import Config
from fp8_suite.training.estimate.layout import SHORTEST_PART, Layout, check_layout
from fp8_suite.training.estimate.memory import peak, resident_state
from fp8_suite.training.estimate.modes import make_setup
from fp8_suite.training.estimate.setup import TrainingSetup
from fp8_suite.training.estimate.sizes import allowed_batches, for_tensors, with_sizes
from fp8_suite.training.estimate.slices import rank_setups
from fp8_suite.training.estimate.step_time import step_seconds
from fp8_suite.training.optim.settings import OptimConfig

SHOWN = 5  # layouts of a table
MODES_TRIED = ("ddp", "fsdp_grad", "hsdp", "fsdp_full")
FULL = 8192  # tokens of a micro-batch from which GEMMs fill a GPU
COLUMNS = (
    *("CP x TP x PP x data", "stages per rank", "mode", "micro-batch", "recompute"),
    *("peak GB", "step ms", "tokens/s", "TFLOP/s"),
)


def best_layouts(cfg: Config, gpu: Gpu, *, gpus: int, **cluster: float) -> list[Plan]:
    """Return the fastest plans on `gpus` GPUs.

    Sizes other than 1 in `cfg` are kept; `cluster` are arguments of `make_plan`. UserError if none fits.
    """
    if cfg.optim.global_batch_size is None and not cfg.optim.batch_ramp:
        reason = "layouts have different numbers of data ranks; add --global_batch_size"
        raise bad_setting(reason, best_layout=True)
    optim = replace(cfg.optim, batch_size=AUTO, gradient_accumulation_steps=None)
    recompute = AUTO if cfg.model.recomputation == "none" else cfg.model.recompute
    cfg = replace(cfg, optim=optim, model=replace(cfg.model, recompute=recompute))
    if limit := cfg.sharding.memory_limit_gb:
        gpu = gpu._replace(memory_gb=limit)
    plans = _fastest(cfg, gpu, gpus=gpus, **cluster)
    if not plans:
        make_plan(cfg, gpu, gpus=gpus, **cluster)  # UserError if settings are refused
        raise bad_setting(f"no layout on {counted(gpus, 'GPU')} fits; use more GPUs", best_layout=True)
    return plans


def _layouts(cfg: Config, gpus: int, per_node: int) -> Iterator[Layout]:
    """Yield the layouts that divide model, sequences and GPUs."""
    shape, length = read_model(cfg.model.model_name).size.shape, cfg.data.max_seq_length
    fixed = Layout(**cfg.sharding.layout).flags.items()
    divisors = [size for size in range(1, gpus + 1) if gpus % size == 0]
    cps = [size for size in divisors if size == 1 or length // size >= SHORTEST_PART]
    tps = [size for size in divisors if size <= per_node]
    for pp in (size for size in divisors if size <= shape.num_layers):
        stages = range(1, shape.num_layers // pp + 1) if pp > 1 else (1,)
        for layout in (Layout(cp, tp, pp, virtual) for cp, tp, virtual in product(cps, tps, stages)):
            if gpus % (layout.cp * layout.slices) or not fixed <= layout.flags.items():
                continue
            with suppress(UserError):
                check_layout(layout, shape, min(gpus, per_node), length)
                yield layout


def _fastest(cfg: Config, gpu: Gpu, *, gpus: int, **cluster: float) -> list[Plan]:
    """Return the plans of the SHOWN fastest CP x TP x PP, by branch and bound over stages per rank and modes.

    The bound is the time without recomputation. Only the last choice tries all sizes of micro-batches.
    """
    setups = _setups(cfg, gpu, gpus, int(cluster["gpus_per_node"]))
    network = {"network": 1e9 * cluster["network_gbs"]}
    fitting = [setup for setup in setups if resident_state(setup) < 1e9 * gpu.memory_gb]
    timed = [(sum(step_seconds(setup, gpu, **network).values()), setup) for setup in fitting]
    fastest: dict[tuple[int, ...], Plan] = {}  # by CP, TP and PP

    def plan(setup: TrainingSetup, optim: OptimConfig) -> Plan:
        changed = replace(cfg, sharding=setup.cfg.sharding, optim=optim)
        return make_plan(changed, gpu, gpus=gpus, **cluster)

    for seconds, setup in sorted(timed, key=lambda pair: pair[0]):
        steps = sorted(plan.step for plan in fastest.values())
        if len(steps) >= SHOWN and seconds > steps[SHOWN - 1]:
            break
        key = (setup.layout.cp, setup.layout.tp, setup.layout.pp)
        known = fastest[key].step if key in fastest else math.inf
        if seconds < known and _least_memory(setup, cfg) <= for_tensors(1e9 * gpu.memory_gb):
            candidate = plan(setup, setup.cfg.optim)
            if candidate.fits and candidate.step < known:
                fastest[key] = candidate
    ranked = sorted(fastest.values(), key=lambda plan: plan.step)[:SHOWN]
    return sorted((plan(best.setup, cfg.optim) for best in ranked), key=lambda plan: plan.step)


def _setups(cfg: Config, gpu: Gpu, gpus: int, per_node: int) -> Iterator[TrainingSetup]:
    """Yield setups for each layout and mode: with micro-batches of FULL tokens, and with the smallest."""
    model, mode = read_model(cfg.model.model_name).size, cfg.sharding.sharding_mode
    modes = MODES_TRIED if mode == AUTO else (mode,)
    for layout, mode in product(_layouts(cfg, gpus, per_node), modes):
        try:
            changed = replace(cfg, sharding=replace(cfg.sharding, sharding_mode=mode, **layout.flags))
            refuse_gemm_sizes(changed, model.shape)
            args = (model, mode, gpus, min(gpus, per_node), 1e9 * gpu.memory_gb)
            request, _ = make_setup(changed, *args)
            batches = allowed_batches(cfg, request.data_ranks)
            rank = rank_setups(request)[0]
            if mode == "hsdp" and rank.shards in (1, rank.gpus):  # the same as another mode
                continue
        except UserError:
            continue
        length = cfg.data.max_seq_length // layout.cp
        full = next((size for size in batches if size * length <= FULL), batches[-1])
        for batch in {full, batches[-1]}:
            yield replace(request, cfg=with_sizes(request.cfg, request.data_ranks, batch))


def _least_memory(setup: TrainingSetup, cfg: Config) -> float:
    """Return the peak bytes with the most recomputation that the settings `cfg` allow."""
    level = ("full" if cfg.model.use_te else "layer") if cfg.model.recompute == AUTO else cfg.model.recompute
    model = replace(setup.cfg.model, recompute=level)
    return sum(peak(replace(setup, cfg=replace(setup.cfg, model=model))).values())


def layouts_table(plans: list[Plan]) -> str:
    """Return a table of layouts with their choices and predictions."""
    rows = []
    for plan in plans:
        setup, cfg, layout = plan.setup, plan.setup.cfg, plan.setup.layout
        sizes = f"{layout.cp} x {layout.tp} x {layout.pp} x {setup.data_ranks}"
        batch = f"{cfg.optim.batch_size} x {setup.accumulation:,}"
        cells = [sizes, str(layout.virtual), setup.mode, batch, cfg.model.recomputation]
        rates = f"{1e3 * plan.step:,.0f}", f"{plan.tokens_per_second:,.0f}", f"{plan.tflops:.0f}"
        rows.append([*cells, f"{plan.peak / 1e9:.1f}", *rates])
    return markdown(COLUMNS, rows)


def layout_flags(plan: Plan) -> str:
    """Return the flags of a plan's layout."""
    setup, cfg = plan.setup, plan.setup.cfg
    mode = {} if setup.mode == "single" else {"sharding_mode": setup.mode}
    sizes = {"batch_size": cfg.optim.batch_size, "recompute": cfg.model.recomputation}
    return " ".join(as_flag(*flag) for flag in (setup.layout.flags | mode | sizes).items())
