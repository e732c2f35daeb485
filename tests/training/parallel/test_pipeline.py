"""Whole runs with pipeline parallelism over gloo on the CPU, with emulated TE layers, against one rank."""

from dataclasses import replace
from itertools import chain

import pytest
import torch.distributed as dist
from fp8_suite.core.errors import UserError
from fp8_suite.te_models.shape import ModelShape
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.estimate.activations import between_stages
from fp8_suite.training.estimate.layout import Layout, check_pipeline
from fp8_suite.training.estimate.setup import ModelSize, rank_setups
from fp8_suite.training.parallel.pipeline import Pipeline
from torch.distributed.pipelining import PipelineStage
from torch.multiprocessing.reductions import StorageWeakRef

from tests.children import preload
from tests.training.estimate.setups import setup_of
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
        (f"{FP8} current --sharding_mode fsdp_grad", f"{PP} --virtual_stages 2"),
        (f"{FP8} delayed --sharding_mode fsdp_full --context_parallel_size 2", f"{PP} --virtual_stages 2"),
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
        (f"{TE} bf16 --max_steps 3", f"{PP} --gradient_accumulation_steps 2", 4, 1e-3),
        (f"{TE} bf16 --max_steps 3", f"{PP} --gradient_accumulation_steps 2 {HSDP}", 4, 1e-3),
        (f"{TE} fp16 --max_steps 3", PP, 2, 1e-3),
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
        (Layout(pp=4), 3, {"gradient_accumulation_steps", "pipeline_parallel_size"}),
        (Layout(pp=4, virtual=2), 6, {"gradient_accumulation_steps", "pipeline_parallel_size"}),
        (Layout(pp=4, virtual=3), 8, {"pipeline_parallel_size", "virtual_stages"}),
    ],
)
def test_pipelines_need_layers_and_micro_batches(layout, micro_batches, flags):
    with pytest.raises(UserError) as error:
        check_pipeline(layout, 10, micro_batches)
    assert set(error.value.flags) == flags


def test_a_ramp_that_starts_with_too_few_micro_batches_is_named():
    with pytest.raises(UserError) as error:
        check_pipeline(Layout(pp=4), 10, 3, "384:0 1Ki:1M")
    assert error.value.flags == {"batch_ramp", "pipeline_parallel_size"}


def test_too_few_micro_batches_are_one_line_on_all_ranks(tmp_path):
    error = refused(start(tmp_path / "run", f"{TE} bf16 --gradient_accumulation_steps 1 {PP}"))
    assert "--gradient_accumulation_steps 2" in error


def print_tensors_between_stages(rank: int) -> None:
    """Print after each step the bytes of receive buffers, and those sent and alive before each backward.

    Of interleaved stages, those that a GPU keeps: NCCL drops what it has sent, Gloo keeps it for the step.
    """
    sent, alive, stages = [], [], {}

    def collect(stage, *args, build=PipelineStage.__init__, **kwargs):
        build(stage, *args, **kwargs)
        stages[stage.stage_index] = stage

    def record_sent(op, tensor, *args, create=dist.P2POp, **kwargs):
        if op is dist.isend:
            sent.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))
        return create(op, tensor, *args, **kwargs)

    def count_and_run(*args, run=PipelineStage.backward_one_chunk, **kwargs):
        outputs = chain(*(stage.fwd_cache.values() for stage in stages.values() if not stage.is_last))
        by_gpu = sum(output.nbytes for (output,), _ in outputs)
        alive.append(by_gpu if len(stages) > 1 else sum(n for storage, n in sent if not storage.expired()))
        run(*args, **kwargs)

    def train_and_print(pipeline, *args, train=Pipeline.train_on):
        sent.clear(), alive.clear()
        result = train(pipeline, *args)
        held = stages.values()
        infos = [[*stage.args_recv_info.values(), *stage.grad_recv_info.values()] for stage in held]
        received = sum(info.buffer.nbytes for info in chain(*chain(*infos)) if info.buffer is not None)
        print("between stages:", rank, received, *alive, flush=True)
        return result

    dist.P2POp, Pipeline.train_on = record_sent, train_and_print
    PipelineStage.__init__, PipelineStage.backward_one_chunk = collect, count_and_run


@pytest.mark.parametrize(
    ("layout", "in_flight", "inputs"),  # by rank: micro-batches of stages in flight; of them, received inputs
    [(Layout(pp=3), (3, 2, 1), (0, 2, 1)), (Layout(pp=2, virtual=2), (5, 3), (2, 3))],
)
def test_memory_between_stages_is_what_torch_keeps(layout, in_flight, inputs, untied, tmp_path):
    settings = layout.flags | {"batch_size": 1, "gradient_accumulation_steps": 6, "max_seq_length": 128}
    flags = f"{TE} bf16 --max_steps 2 --no_export {untied} "
    flags += " ".join(f"--{name} {value}" for name, value in settings.items())
    job = train(tmp_path / "run", flags, ranks=layout.pp, patch=print_tensors_between_stages)
    lines = {line for line in job.printed().splitlines() if line.startswith("between stages:")}
    model = ModelSize(10**6, ModelShape(128, 5, 4, 2, 64, 256, 2048))
    ranks = rank_setups(replace(setup_of(mode="ddp", gpus=layout.pp, **settings), model=model))
    tensor = 2 * 128 * 128
    for rank, line in zip(ranks, sorted(lines), strict=True):  # both steps print the same
        received, *alive = map(int, line.split()[3:])
        counted, is_interleaved = tensor * inputs[rank.stage], layout.virtual > 1
        gradient = tensor * (rank.stage > 0 or is_interleaved)
        kept = alive[-in_flight[rank.stage]] + gradient * is_interleaved
        assert between_stages(rank) == received + kept - counted
        assert between_stages(rank, at_end=True) == received + alive[-1] * (not is_interleaved) + gradient
