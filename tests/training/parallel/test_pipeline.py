"""Whole runs with pipeline parallelism over gloo on the CPU, with emulated TE layers, against one rank."""

import pytest
from fp8_suite.core.errors import UserError
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.estimate.layout import Layout, check_pipeline

from tests.children import preload
from tests.training.parallel import jobs
from tests.training.parallel.jobs import checkpoint, curve, exported, refused, same_bits, saved, start, train
from tests.training.parallel.sums_in_gemms import sum_in_gemms
from tests.training.parallel.test_multi_gpu import resume_in_layouts, same_run

preload(__name__)
TE = "--use_te --max_seq_length 128 --batch_size 1 --gradient_accumulation_steps 4 --mixed_precision"
FP8 = f"{TE} fp8 --max_steps 3 --fp8_scenario"
EPOCH = f"{TE} bf16 --num_of_samples 20"  # its last step has one micro-batch
UNCLIPPED = "--max_grad_norm 0"
PP, HSDP = "--pipeline_parallel_size 2", "--sharding_mode hsdp --hsdp_shard_size 2"


@pytest.fixture(scope="module")
def untied(small) -> str:
    """Flags of a model with five layers and an LM head of its own."""
    return small(tie_word_embeddings=False, num_hidden_layers=5)


@pytest.fixture(scope="module")
def tied(small) -> str:
    return small()


@pytest.mark.parametrize(
    ("flags", "pipeline"),
    [
        (f"{EPOCH} --no_packing", PP),
        (f"{FP8} delayed", f"{PP} --recompute mlp:2+layer"),
        (f"{FP8} delayed", f"{PP} --virtual_stages 2"),
        (f"{FP8} block --bf16_last_layers 1", PP),
    ],
)
def test_a_pipeline_is_the_run_of_one_rank_bit_for_bit(flags, pipeline, untied, reference, tmp_path):
    """Micro-batches run in the same order. Only the norm is summed in another one, so nothing is clipped."""
    flags = f"{flags} {untied} {UNCLIPPED}"
    folder, one = train(tmp_path / "run", f"{flags} {pipeline}").folder, reference(flags)
    same_run(folder, one, rel=1e-6)
    assert curve(folder) == curve(one) and curve(folder, "eval/loss") == curve(one, "eval/loss")
    assert same_bits(exported(folder), exported(one))
    assert jobs.record(folder, "env.json")["coverage"] == jobs.record(one, "env.json")["coverage"]


@pytest.mark.parametrize(
    ("flags", "pipeline"),
    [
        (f"{EPOCH} --sharding_mode fsdp_full --gradient_accumulation_steps 3", PP),
        (f"{FP8} delayed --no_packing --tensor_parallel_size 2", f"{PP} --virtual_stages 2"),
        (f"{FP8} delayed --sharding_mode fsdp_grad --context_parallel_size 2", f"{PP} --virtual_stages 2"),
    ],
)
def test_pipelines_of_several_ranks_are_the_run_of_those_ranks_bit_for_bit(flags, pipeline, untied, tmp_path):
    patch = sum_in_gemms if "fsdp" in flags else None
    flags = f"{flags} {untied} {UNCLIPPED}"
    two, four = (
        train(tmp_path / str(ranks), f"{flags} {layout}", ranks=ranks, patch=patch).folder
        for ranks, layout in ((2, ""), (4, pipeline))
    )
    assert curve(four) == curve(two) and curve(four, "eval/loss") == curve(two, "eval/loss")
    assert same_bits(exported(four), exported(two))


@pytest.mark.parametrize(
    ("flags", "pipeline", "ranks", "rel"),
    [
        (f"{FP8} delayed", "--pipeline_parallel_size 3", 3, 1e-3),
        (f"{TE} bf16 --max_steps 3", f"{PP} --gradient_accumulation_steps 2 {HSDP}", 4, 1e-3),
        (f"{TE} fp16 --max_steps 3", f"{PP} --gradient_accumulation_steps 2", 4, 1e-3),
    ],
)
def test_tied_embeddings_and_clipping_and_copies_of_a_pipeline(
    flags, pipeline, ranks, rel, tied, reference, tmp_path
):
    flags = f"{flags} {tied}"
    folder = train(tmp_path / "run", f"{flags} {pipeline}", ranks=ranks).folder
    same_run(folder, reference(flags), rel=rel)


def test_a_run_resumes_bit_for_bit_and_in_another_layout(tied, reference, tmp_path):
    flags = f"{FP8} delayed {tied} --max_steps 4"
    whole = reference(flags)
    shared = train(tmp_path / "shared", f"{flags} {PP} --save_interval 2").folder
    assert saved(shared, 4).keys() == saved(whole, 4).keys()
    layouts = {
        "same": (shared, PP, 2),
        "on one": (shared, "", 1),
        "both": (shared, f"{PP} --sharding_mode fsdp_full --gradient_accumulation_steps 2", 4),
        "on three": (whole, "--pipeline_parallel_size 3", 3),
    }
    resume_in_layouts(tmp_path, flags, layouts, 1e-3)


def test_state_moves_between_layouts_bit_for_bit(untied, tmp_path):
    """Resume at the end of a run, without further steps; moments in blocks follow."""
    flags = f"{TE} bf16 --max_steps 2 --moment_dtype fp8 --no_export {untied}"
    folder = train(tmp_path / "run", f"{flags} {PP} --virtual_stages 2 --save_interval 2").folder
    expected = saved(folder, 2)
    assert any(name.endswith("_exponents") for name in expected)
    tp = "--tensor_parallel_size 2"
    layouts = (
        (1, ""),
        (4, f"{tp} --sharding_mode fsdp_full --gradient_accumulation_steps 2"),
        (3, "--pipeline_parallel_size 3"),
        (4, f"{PP} {tp}"),
        (1, ""),
    )
    for number, (ranks, layout) in enumerate(layouts):
        again = f"{flags} {layout} --resume {checkpoint(folder, 2)}"
        job = train(tmp_path / str(number), again, ranks=ranks)
        folder = job.folder
        assert same_bits(saved(folder, 2), expected), layout
        assert ("TP 2, PP 2" in job.printed()) == (layout == f"{PP} {tp}")


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"use_te": False}, {"pipeline_parallel_size", "use_te"}),
        ({"sharding_mode": "ds_zero2"}, {"pipeline_parallel_size", "sharding_mode"}),
        ({"lora_rank": 8}, {"pipeline_parallel_size", "lora_rank"}),
        ({"offload_optimizer": True}, {"pipeline_parallel_size", "offload_optimizer"}),
        ({"grad_reduce_dtype": "fp8"}, {"pipeline_parallel_size", "grad_reduce_dtype"}),
        ({"pipeline_parallel_size": 1, "virtual_stages": 2}, {"virtual_stages"}),
    ],
)
def test_settings_that_exclude_pipelines_are_refused(settings, flags):
    with pytest.raises(UserError) as error:
        config_from_dict({"use_te": True, "pipeline_parallel_size": 2} | settings)
    assert set(error.value.flags) == flags


@pytest.mark.parametrize(
    ("layout", "micro_batches", "flags"),
    [
        (Layout(pp=4), 3, {"pipeline_parallel_size"}),
        (Layout(pp=4, virtual=2), 6, {"pipeline_parallel_size"}),
        (Layout(pp=4, virtual=3), 8, {"pipeline_parallel_size", "virtual_stages"}),
    ],
)
def test_pipelines_need_layers_and_micro_batches(layout, micro_batches, flags):
    with pytest.raises(UserError) as error:
        check_pipeline(layout, 10, micro_batches)
    assert set(error.value.flags) == flags


def test_too_few_micro_batches_are_one_line_on_all_ranks(tmp_path):
    error = refused(start(tmp_path / "run", f"{TE} bf16 --gradient_accumulation_steps 1 {PP}"))
    assert "--gradient_accumulation_steps 2" in error
