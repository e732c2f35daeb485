"""Whole runs with tensor parallelism over gloo on the CPU, with emulated TE layers, against one rank."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fp8_suite.core.errors import UserError
from fp8_suite.te_models.parallel.tensor_parallel import Region, TensorParallel
from fp8_suite.te_models.shape import ModelShape
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.parallel.strategies import Strategy
from fp8_suite.training.precision.checks import check_part, check_tensor_parallel
from torch import Tensor, nn

from tests.children import preload, run_ranks
from tests.training.parallel.jobs import saved
from tests.training.parallel.test_multi_gpu import resume_in_layouts, same_run

preload(__name__)
TE = "--use_te --max_steps 3 --mixed_precision"
TP = "--tensor_parallel_size 2 --sharding_mode"
FP8 = f"{TE} fp8 --fp8_scenario"
HEAD, CP, PP = "--fp8_lm_head", "--context_parallel_size 2", "--pipeline_parallel_size 2"
TIED, UNTIED, WIDE = "{tied}", "{untied}", "{wide}"


@pytest.fixture(scope="module")
def models(small) -> dict[str, str]:
    layers, full = {"num_hidden_layers": 2}, {"hidden_size": 256, "intermediate_size": 512}
    untied = layers | {"tie_word_embeddings": False}
    return {"tied": small(**layers), "untied": small(**untied), "wide": small(**untied, **full)}


@pytest.fixture(scope="module")
def run(once, models) -> Callable[..., Path]:
    """Return a run of one of `models` with checkpoints, trained once for each set of flags."""
    return lambda flags, **ranks: once(f"{flags} --save_interval 2".format(**models), **ranks)


@pytest.mark.parametrize(
    ("flags", "sharding", "ranks", "rel"),
    [
        (f"{TE} bf16 --no_packing --gradient_accumulation_steps 2", "ddp", 2, 1e-3),
        (f"{TE} bf16 --model_name tiny-qwen2 --recompute mlp", "fsdp_full", 2, 1e-3),
        (f"{TE} bf16 --model_name tiny-qwen3", "fsdp_grad --batch_size 1", 4, 1e-3),
        (f"{TE} bf16 {UNTIED}", f"ddp {CP} --recompute cheap", 4, 1e-3),
        (f"{FP8} delayed {TIED} --no_packing --recompute mlp", f"fsdp_full {CP}", 4, 1e-2),
        (f"{FP8} current {TIED} --no_packing --recompute full", "ddp --batch_size 1", 4, 2e-2),
        (f"{FP8} delayed {HEAD} {WIDE}", "fsdp_full --recompute layer", 2, 1e-2),
        (f"{FP8} delayed {HEAD} {TIED} --gradient_accumulation_steps 2", f"ddp {PP}", 4, 1e-2),
        (f"{FP8} block --model_name tiny-qwen3", "hsdp --hsdp_shard_size 1 --batch_size 1", 4, 1e-2),
    ],
)
def test_a_run_whose_ranks_share_layers_is_that_of_one_rank(flags, sharding, ranks, rel, run):
    """Ranks round terms of a sum to BF16, which after FP8 casts changes norms as much as wrong scales do."""
    folder, whole = run(f"{flags} {TP} {sharding}", ranks=ranks), run(flags)
    same_run(folder, whole, rel=rel)
    same_scales(folder, whole, step=2, ratio=ranks / (4 if "pipeline" in sharding else 2))
    ours, theirs = saved(folder, 2), saved(whole, 2)
    for name, moment in theirs.items():  # Adam's steps do not show the size of a gradient
        if "norm" in name and name.endswith("exp_avg"):
            assert (ours[name] - moment).norm() < 0.4 * moment.norm(), name
    if "fsdp" in sharding:  # backward casts weights again, of which each rank has a part
        for name, history in saved(folder, 2, ("fp8/",)).items():
            if name.endswith("scaling_fwd.amax_history"):  # [steps, 3 per GEMM]; the second is the weight's
                assert (history[0, 1::3] >= 0.97 * history[-1, 1::3]).all(), name


def same_scales(first: Path, second: Path, *, step: int, ratio: float) -> None:
    """Compare the scales of delayed scaling, if any; gradients in `first` are `ratio` times as large.

    Rounding moves them by up to 6 %, amaxes of a part of the ranks by 19 % or more.
    """
    scales = saved(first, step, ("fp8/",))
    for name, expected in saved(second, step, ("fp8/",)).items():
        if name.endswith(".scale"):
            scale = scales[name] * (ratio if ".scaling_bwd." in name else 1)
            torch.testing.assert_close(scale, expected, rtol=0.15, atol=0, msg=f"{name}: {scale / expected}")


class Halves(nn.Module):
    """A weight of which each of two ranks has a half, and one that both have."""

    def __init__(self, gradient: Tensor, rank: int):
        super().__init__()
        self.part, self.whole = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
        self.part.grad, self.whole.grad = gradient[2 * rank :][:2].clone(), gradient[4:] * (1 + 2 * rank) / 4
        self.regions = {"part": Region.of(self.part, 0, 1, 2, rank)}


def compare_norms(rank: int, folder: Path) -> None:
    gradient, tensor = torch.arange(1.0, 8.0), TensorParallel(dist.group.WORLD)
    model = Halves(gradient, rank)
    strategy = Strategy.__new__(Strategy)
    strategy.tensor = tensor
    norm = strategy._norm_of_layers(model)
    assert norm == pytest.approx(gradient.norm()) and torch.equal(model.whole.grad, gradient[4:])


def test_the_gradient_norm_counts_what_ranks_share_once(tmp_path):
    run_ranks(compare_norms, tmp_path)


def test_a_checkpoint_resumes_bit_for_bit_and_in_another_layout(run, models, tmp_path):
    """Moments in blocks and scaling state follow: 4 ranks -> the same, one; one rank -> two."""
    flags = f"{FP8} delayed {UNTIED} --moment_dtype fp8 --max_steps 4"
    layout = f"{TP} fsdp_full --batch_size 1"
    shared, whole = run(f"{flags} {layout}", ranks=4), run(flags)
    layouts = {"same": (shared, layout, 4), "one": (shared, "", 1), "shared": (whole, f"{TP} ddp", 2)}
    resume_in_layouts(tmp_path, flags.format(**models), layouts, 1e-2)
    same_scales(tmp_path / "one", shared, step=4, ratio=0.5)


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"use_te": False}, {"use_te"}),
        ({"sharding_mode": "ds_zero2"}, {"sharding_mode"}),
        ({"lora_rank": 8}, {"lora_rank"}),
        ({"offload_optimizer": True}, {"offload_optimizer"}),
        ({"tensor_parallel_size": 3}, set()),
        ({"tensor_parallel_size": 4}, set()),
        ({"moment_dtype": "fp8"}, {"moment_dtype"}),
        # 32 columns of the output projection on each rank
        ({"mixed_precision": "fp8", "fp8_scenario": "block"}, {"fp8_scenario", "model_name"}),
    ],
)
def test_what_cannot_run_is_refused(settings, flags):
    shape = ModelShape(64, 2, 8, 2, 8, 128, 256)  # 32 columns of the output projection on each of two ranks
    with pytest.raises(UserError) as refused:
        cfg = config_from_dict({"use_te": True, "tensor_parallel_size": 2} | settings)
        check_part(cfg, shape=shape, gpus_per_node=12)
    assert refused.value.flags == {"tensor_parallel_size"} | flags


def test_sizes_must_divide_the_vocabulary_and_the_ranks():
    cfg = config_from_dict({"use_te": True, "tensor_parallel_size": 2})
    for shape in (ModelShape(64, 2, 8, 2, 8, 128, 257), ModelShape(64, 2, 8, 2, 8, 48, 256)):
        with pytest.raises(UserError) as refused:
            check_tensor_parallel(cfg, shape, 2)
        assert refused.value.flags == {"tensor_parallel_size"}
    with pytest.raises(UserError) as refused:
        cfg.sharding.data_ranks(3)
    assert refused.value.flags == {"tensor_parallel_size"}
