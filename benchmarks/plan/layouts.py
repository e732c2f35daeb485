"""Find the fastest layout for a model, a sequence length and a number of GPUs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fp8_suite.benchmarks.plan.inputs import read_model
from fp8_suite.benchmarks.plan.predict import Plan, make_plan
from fp8_suite.benchmarks.report.tables import markdown
from fp8_suite.core.errors import as_flag
from fp8_suite.core.gpus import Gpu
from fp8_suite.core.settings import AUTO
from fp8_suite.training.config import Config
from fp8_suite.training.estimate.search import LayoutSearch
from fp8_suite.training.estimate.sizes import auto_sizes, without_auto_sizes
from fp8_suite.training.estimate.transfers import NETWORK_BANDWIDTH
from fp8_suite.training.parallel.settings import AXES

SHOWN = 5  # layouts of a table
COLUMNS = (
    *("CP x TP x PP x data", "stages per rank", "mode", "micro-batch", "recompute"),
    *("peak GB", "step ms", "tokens/s", "TFLOP/s"),
)


def best_layouts(
    cfg: Config, gpu: Gpu, *, gpus: int, gpus_per_node: int = 8, network_gbs: float = NETWORK_BANDWIDTH / 1e9
) -> list[Plan]:
    """Return the fastest plans on `gpus` GPUs. UserError if none fits.

    Parallel sizes of `auto` are searched; without any, those of 1, with all micro-batches and recomputation.
    """
    searched: dict = auto_sizes(cfg)
    if not searched:
        searched = {"best_layout": True}
        sizes = {name: AUTO for name in AXES.values() if getattr(cfg.sharding, name) == 1}
        recompute = AUTO if cfg.model.recomputation == "none" else cfg.model.recompute
        model, optim = replace(cfg.model, recompute=recompute), replace(cfg.optim, batch_size=AUTO)
        cfg = replace(cfg, optim=optim, model=model, sharding=replace(cfg.sharding, **sizes))
    size, per_node = read_model(cfg.model.model_name).size, min(gpus, gpus_per_node)
    free = int(1e9 * (cfg.sharding.memory_limit_gb or gpu.memory_gb))
    from fp8_suite.training.precision.checks import check_part  # here because it imports torch

    check = partial(check_part, shape=size.shape, gpus_per_node=per_node)
    search = LayoutSearch(size, gpus, per_node, gpu, free, searched, check, 1e9 * network_gbs)
    cluster = {"gpus": gpus, "gpus_per_node": gpus_per_node, "network_gbs": network_gbs}
    plans = [make_plan(best.requested.cfg, gpu, **cluster) for best in search.fastest(cfg, SHOWN)]
    if not plans:
        if next(search.setups(cfg), None) is None:
            make_plan(without_auto_sizes(cfg), gpu, **cluster)  # UserError if settings are refused
        raise search.misfit()
    return plans


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
