"""Whole runs with context parallelism over gloo on the CPU, with emulated TE layers, against one rank."""

from dataclasses import replace

import pytest
import torch
from fp8_suite.core.errors import EXIT_FAILED, UserError
from fp8_suite.te_models.emulation import context
from fp8_suite.te_models.shape import ModelShape
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.estimate.sizes import check_number_of_ranks
from fp8_suite.training.parallel.context_parallel import comm_type

from tests.children import preload
from tests.training.parallel import jobs
from tests.training.parallel.jobs import start, train
from tests.training.parallel.test_multi_gpu import resume_in_layouts, same_run

preload(__name__)
TE = "--use_te --max_steps 3 --max_seq_length 256 --mixed_precision"
SHARED = "--context_parallel_size 2 --sharding_mode"
FP8 = f"{TE} fp8 --fp8_scenario"


@pytest.fixture(scope="module")
def model(small) -> str:
    return small(num_hidden_layers=2)


@pytest.mark.parametrize(
    ("flags", "sharding", "ranks", "rel"),
    [
        (f"{TE} bf16 --no_packing", f"{SHARED} fsdp_full --recompute full", 2, 1e-3),
        (f"{TE} bf16", f"{SHARED} hsdp --hsdp_shard_size 2 --recompute cheap --batch_size 1", 4, 1e-3),
        (f"{FP8} delayed --gradient_accumulation_steps 2", f"{SHARED} fsdp_grad --recompute layer", 2, 1e-2),
        (f"{FP8} block", f"{SHARED} fsdp_full --recompute mlp", 2, 1e-2),
    ],
)
def test_a_run_whose_ranks_share_sequences_is_that_of_one_rank(
    flags, sharding, ranks, rel, model, reference, tmp_path
):
    flags = f"{flags} {model}"
    job = train(tmp_path / "run", f"{flags} {sharding}", ranks=ranks)
    same_run(job.folder, reference(flags), rel=rel)
    assert jobs.record(job.folder, "env.json")["cp_comm_type"] == "all_gather"


def test_a_run_resumes_bit_for_bit_and_in_another_layout(model, reference, tmp_path):
    flags = f"{TE} bf16 {model} --max_steps 4"
    shared = train(tmp_path / "shared", f"{flags} {SHARED} fsdp_full --save_interval 2").folder
    layouts = {
        "same": (shared, f"{SHARED} fsdp_full", 2),
        "on one": (shared, "", 1),
        "on two": (reference(flags), f"{SHARED} ddp", 2),
    }
    resume_in_layouts(tmp_path, flags, layouts, 1e-3)


def forget_the_others(rank: int) -> None:
    """Emulate a kernel that attends within its rank."""
    gather = context.gather_tokens

    def own_keys(x, group):
        parts = gather(x, group).chunk(group.size())
        return torch.cat([part * (number == group.rank()) for number, part in enumerate(parts)])

    context.gather_tokens = own_keys


def test_attention_without_the_keys_of_other_ranks_is_refused(tmp_path):
    job = start(tmp_path / "run", f"{TE} bf16 {SHARED} ddp", patch=forget_the_others)
    assert set(job.wait()) == {EXIT_FAILED}, job.printed()
    assert any("--cp_comm_type all_gather" in line for line in job.errors()), job.printed()


@pytest.mark.parametrize(
    ("settings", "ranks", "flags"),
    [
        ({"use_te": False}, 2, {"context_parallel_size", "use_te"}),
        ({"sharding_mode": "ds_zero2"}, 2, {"context_parallel_size", "sharding_mode"}),
        ({"context_parallel_size": 1, "cp_comm_type": "p2p"}, 2, {"cp_comm_type"}),
        ({"cp_comm_type": "a2a+p2p"}, 2, {"cp_comm_type", "packing"}),
        ({"cp_comm_type": "a2a+p2p", "packing": False}, 2, {"cp_comm_type", "context_parallel_size"}),
        ({"cp_comm_type": "a2a", "context_parallel_size": 3}, 3, {"cp_comm_type", "context_parallel_size"}),
        ({}, 1, {"context_parallel_size"}),
        ({}, 3, {"context_parallel_size"}),
        ({"tensor_parallel_size": 2}, 2, {"context_parallel_size", "tensor_parallel_size"}),
        ({"global_batch_size": 3}, 4, {"global_batch_size"}),
        ({"sharding_mode": "hsdp", "hsdp_shard_size": 3}, 6, {"hsdp_shard_size", "context_parallel_size"}),
    ],
)
def test_sizes_that_cannot_run_are_refused(settings, ranks, flags):
    with pytest.raises(UserError) as refused:
        cfg = config_from_dict({"use_te": True, "context_parallel_size": 2} | settings)
        check_number_of_ranks(cfg, cfg.sharding.data_ranks(ranks))
        comm_type(cfg.sharding, ModelShape(64, 2, 8, 4, 8, 128, 256), "native")
        cfg.sharding.shard_size(ranks, ranks)
    assert flags <= refused.value.flags


@pytest.mark.parametrize("requested", ["p2p", "a2a"])
def test_emulated_layers_gather_keys(requested):
    shape, settings = ModelShape(64, 2, 8, 4, 8, 128, 256), {"use_te": True, "context_parallel_size": 2}
    with pytest.raises(UserError) as refused:
        comm_type(config_from_dict(settings | {"cp_comm_type": requested}).sharding, shape, "emulated")
    assert refused.value.flags == {"cp_comm_type"}
    assert comm_type(config_from_dict(settings).sharding, shape, "emulated") == "all_gather"
    assert comm_type(config_from_dict(settings).sharding, shape, "native") == "a2a"
    one_group = replace(shape, num_kv_heads=1)
    assert comm_type(config_from_dict(settings).sharding, one_group, "native") == "all_gather"
