"""The search of the fastest layout against all layouts, and what it does about what does not fit."""

import json
from dataclasses import replace
from itertools import product

import pytest
from fp8_suite.benchmarks.plan.check import PUBLISHED, plan_published
from fp8_suite.benchmarks.plan.layouts import best_layouts
from fp8_suite.benchmarks.plan.main import run
from fp8_suite.benchmarks.plan.predict import make_plan
from fp8_suite.core.errors import UserError
from fp8_suite.core.gpus import GPUS
from fp8_suite.te_models.presets import PRESETS
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.estimate.layout import Layout
from fp8_suite.training.estimate.search import MODES_TRIED

FP8 = {"use_te": True, "mixed_precision": "fp8"}


def settings(size: str, length: int, batch: int, **more):
    name = f"meta-llama/Llama-3.1-{size}"
    return config_from_dict(
        {"model_name": name, "max_seq_length": length, "global_batch_size": batch} | FP8 | more
    )


def search(cfg, gpus: int, gpu: str = "H100"):
    return best_layouts(cfg, GPUS[gpu], gpus=gpus, gpus_per_node=8, network_gbs=50.0)


def test_no_layout_is_faster_than_the_one_found():
    cfg = settings("8B", 32_768, 8)
    plans = search(cfg, 4)
    cfg = replace(
        cfg,
        optim=replace(cfg.optim, batch_size="auto", gradient_accumulation_steps=None),
        model=replace(cfg.model, recompute="auto"),
    )
    steps = {}
    for cp, tp, pp, mode in product((1, 2, 4), (1, 2, 4), (1, 2, 4), MODES_TRIED):
        for virtual in (1,) if pp == 1 else (1, 2, 4, 8, 16):
            layout = Layout(cp, tp, pp, virtual)
            sharding = replace(cfg.sharding, sharding_mode=mode, **layout.flags)
            changed = replace(cfg, sharding=sharding)
            try:
                plan = make_plan(changed, GPUS["H100"], gpus=4)
            except UserError:
                continue
            if plan.fits:
                steps[layout, mode] = plan.step
    assert len(steps) > 20
    assert plans[0].step == pytest.approx(min(steps.values()), rel=1e-3)
    assert [plan.step for plan in plans[:5]] == sorted(plan.step for plan in plans[:5])


def test_a_405b_needs_tensor_and_pipeline_parallelism():
    llama = plan_published(PUBLISHED[1])
    plans = search(settings("405B", 8192, 2048, mixed_precision="bf16", flash_attention=False), 16_384)
    assert plans[0].fits and plans[0].step <= llama.step
    assert all(min(plan.setup.layout.tp, plan.setup.layout.pp) > 1 for plan in plans)


def test_sequences_too_long_for_a_gpu_are_shared():
    plans = search(settings("8B", 131_072, 1), 8)
    assert all(plan.setup.layout.cp > 1 for plan in plans if plan.setup.layout.slices == 1)
    assert any(plan.setup.layout.slices == 1 for plan in plans), "training runs context parallelism"


def test_sizes_that_are_given_are_kept_and_adapters_are_not_split():
    plans = search(settings("8B", 8192, 64, tensor_parallel_size=4), 8)
    assert {plan.setup.layout.tp for plan in plans} == {4}
    plans = search(settings("8B", 8192, 64, lora_rank=16), 8)
    assert {plan.setup.layout.slices for plan in plans} == {1}


@pytest.mark.parametrize("precision", [{"fp8_lm_head": True}, {"fp8_scenario": "block"}])
def test_layouts_whose_parts_do_not_fit_the_recipe_are_left_out(precision, tmp_path):
    sizes = {"vocab_size": 16 * 2001, "intermediate_size": 128 * 113}  # neither half is a multiple
    preset = PRESETS["meta-llama/Llama-3.1-8B"] | sizes
    (tmp_path / "config.json").write_text(json.dumps(preset))
    plans = search(settings("8B", 8192, 64, **precision, model_name=str(tmp_path)), 2)
    assert len(plans) > 2 and {plan.setup.layout.tp for plan in plans} == {1}


def test_what_cannot_be_searched_is_an_error_with_its_flag():
    for cfg, flag in (
        (settings("8B", 8192, None), "best_layout"),
        (settings("8B", 8192, None, context_parallel_size="auto"), "context_parallel_size"),
        (settings("405B", 8192, 8), "best_layout"),
        # 8 ranks cannot share the batch, but the layouts that can do not fit.
        (settings("70B", 32_768, 32, batch_size=8, tensor_parallel_size="auto"), "tensor_parallel_size"),
    ):
        with pytest.raises(UserError) as error:
            search(cfg, 8)
        assert error.value.flags == {flag}


def test_pipelines_without_micro_batches_for_their_stages_are_not_planned():
    command = (
        "--model_name meta-llama/Llama-3.1-8B --use_te --gpus 8 --batch_size 1 --pipeline_parallel_size 4"
    )
    for flags in ("", "--gradient_accumulation_steps 6 --virtual_stages 2"):
        with pytest.raises(UserError) as error:
            run(f"{command} {flags}".split())
        assert "pipeline_parallel_size" in error.value.flags
    assert "8 micro-batches" in run(f"{command} --gradient_accumulation_steps 8 --virtual_stages 2".split())


def test_the_command_prints_flags_that_give_the_same_plan():
    flags = "--model_name meta-llama/Llama-3.1-8B --use_te --mixed_precision fp8 --gpu H100 --gpus 1,4"
    command = f"{flags} --max_seq_length 8192 --global_batch_size 16".split()
    text = run([*command, "--best_layout"])
    assert "1 GPU:\n\n--best_layout: no layout" in text
    fastest = next(line for line in text.splitlines() if line.startswith("Fastest: "))
    row = next(line for line in text.splitlines() if line.startswith("| 4 "))
    assert row in run([*command, *fastest.partition(" ")[2].split()])
