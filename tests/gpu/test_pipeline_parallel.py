"""Pipelines of Transformer Engine's layers against one GPU: two ranks on one GPU through Gloo, or NCCL."""

import json
from pathlib import Path

import pytest
from fp8_suite.te_models.presets import PRESETS

from tests.gpu.test_multi_gpu import (
    DETERMINISTIC,
    GPUS,
    LONG,
    flags,
    launch,
    logged,
    summary,
    whole_checkpoint,
)

PRECISIONS = {"bf16": "bf16", "delayed": "delayed", "current": "current", "block": "fp8 --fp8_scenario block"}
PP = "--pipeline_parallel_size 2"
# By name: flags of a run in BF16 and in delayed scaling.
OPTIONS = {
    "interleaved": f"{PP} --virtual_stages 2",
    "layer": f"{PP} --recompute layer",
    "mlp": f"{PP} --recompute mlp:2+full",
    "padded": f"{PP} --no_packing",
    "sharded": f"{PP} --sharding_mode fsdp_full",  # over one rank
}


def settings(model: Path, precision: str, options: str = "") -> str:
    """Return the flags of a run of four micro-batches per step, which is the same on any number of ranks."""
    run = flags("", PRECISIONS[precision], gpus=1, accumulation=4, steps=LONG)
    return f"{run} --model_name {model} --tokenizer_name demo --init random --no_export {options}"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    changes = {"num_hidden_layers": 5, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(PRESETS["tiny-llama"] | changes))
    return folder


@pytest.fixture(scope="module")
def one(model, tmp_path_factory) -> Path:
    """Runs on one GPU in every precision, padded, and with tied embeddings."""
    folder = tmp_path_factory.mktemp("one")
    runs = {precision: settings(model, precision) for precision in PRECISIONS}
    runs |= {f"{name}-padded": settings(model, name, "--no_packing") for name in ("bf16", "delayed")}
    launch(folder, runs | {"tied": flags("", "bf16", gpus=1, accumulation=4, steps=LONG)}, 1, **DETERMINISTIC)
    return folder


def runs_of(model: Path) -> dict[str, str]:
    runs = {precision: settings(model, precision, PP) for precision in PRECISIONS}
    for precision in ("bf16", "delayed"):
        runs |= {f"{precision}-{name}": settings(model, precision, flag) for name, flag in OPTIONS.items()}
    return runs | {"tied": f"{flags('', 'bf16', gpus=1, accumulation=4, steps=LONG)} {PP}"}


@pytest.fixture(scope="module")
def shared(model, tmp_path_factory) -> Path:
    """Runs of two ranks on one GPU, through Gloo."""
    folder = tmp_path_factory.mktemp("shared")
    launch(folder, runs_of(model), 2, SHARE_GPU="1", **DETERMINISTIC)
    return folder


@pytest.fixture(scope="module")
def many(model, tmp_path_factory) -> Path:
    """Runs of two ranks on two GPUs, through NCCL."""
    if GPUS < 2:
        pytest.skip("needs two GPUs")
    folder = tmp_path_factory.mktemp("many")
    launch(folder, runs_of(model), 2, **DETERMINISTIC)
    return folder


def check(folder: Path, one: Path, model: Path) -> None:
    for name in runs_of(model):
        precision, _, option = name.partition("-")
        reference = one / (name if option == "padded" else precision)
        expected, actual = (logged(run, "train/loss") for run in (reference, folder / name))
        gap = max(abs(actual[step] / expected[step] - 1) for step in expected)
        print(f"{name}: largest gap {gap:.1e}")
        assert sorted(actual) == list(range(1, LONG + 1)) == sorted(expected)
        bound = 1e-3 if precision in ("bf16", "tied") else 5e-3
        # FSDP2 rounds sums of gradients to BF16, and casts weights to FP8 again in backward.
        assert gap < (4 * bound if option == "sharded" else bound), name
        assert summary(folder / name)["tokens"] == summary(reference)["tokens"]


@pytest.mark.gpu
def test_two_ranks_on_one_gpu_have_the_losses_of_one(one, shared, model):
    check(shared, one, model)


@pytest.mark.multi_gpu
def test_two_gpus_have_the_losses_of_one(one, many, model):
    check(many, one, model)


@pytest.mark.gpu
def test_a_pipeline_resumes_bit_for_bit_and_on_one_rank(model, tmp_path):
    saved = f"{PP} --save_interval 25"
    share = {"SHARE_GPU": "1", **DETERMINISTIC}
    for folder in ("first", "again", "one"):
        (tmp_path / folder).mkdir()
    launch(tmp_path / "first", {"run": settings(model, "delayed", saved)}, 2, **share)
    run = tmp_path / "first" / "run"
    resume = f"--resume {run}/checkpoints/step_000025"
    launch(tmp_path / "again", {"run": settings(model, "delayed", f"{saved} {resume}")}, 2, **share)
    launch(tmp_path / "one", {"run": settings(model, "delayed", resume)}, 1, **DETERMINISTIC)
    expected = {step: loss for step, loss in logged(run, "train/loss").items() if step > 25}
    assert logged(tmp_path / "again" / "run", "train/loss") == expected
    assert logged(tmp_path / "one" / "run", "train/loss") == pytest.approx(expected, rel=5e-3)
    first, again = whole_checkpoint(run), whole_checkpoint(tmp_path / "again" / "run")
    assert first.keys() == again.keys() and all((again[name] == first[name]).all() for name in first)
