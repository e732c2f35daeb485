"""Models of native TE layers in transformers' Trainer, TRL and peft."""

import pytest
import torch
from fp8_suite.core.recipes import TE_RECIPES
from fp8_suite.training.precision.recipes import why_not
from transformers import AutoModelForCausalLM

from fp8_suite import te_models
from tests.te_models import test_library
from tests.te_models.test_library import ROWS, batch, examples, hugging_face, suite_steps, trained

pytestmark = pytest.mark.gpu
ON_GPU = {"use_cpu": False}


@pytest.mark.parametrize("recipe", ["bf16", *TE_RECIPES])
def test_trainer_trains_as_the_suite_with_all_gemms_in_the_recipe(recipe, tmp_path):
    if recipe != "bf16" and (reason := why_not(recipe)):
        pytest.skip(reason)
    source, rows = hugging_face().cuda(), examples()
    _, expected = suite_steps(source, recipe, rows, backend="native")
    model = te_models.convert(source, recipe=recipe)
    losses = trained(model, tmp_path, rows=rows, **ON_GPU)
    assert losses.values == pytest.approx(expected, rel=2e-3)
    gemms = {row.modules.rpartition(".")[2]: row for row in model.coverage().rows if "layers" in row.modules}
    del gemms["core_attention"]
    assert {name: row.count for name, row in gemms.items()} == dict.fromkeys(
        ("layernorm_qkv", "proj", "layernorm_mlp"), 2
    )
    assert {row.precision for row in gemms.values()} == {recipe if recipe == "bf16" else f"fp8 {recipe}"}


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current"])
def test_loss_and_logits_are_close_to_those_of_transformers(recipe):
    source, inputs = hugging_face().cuda(), {n: t.cuda() for n, t in batch(examples(ROWS)).items()}
    model = te_models.convert(source, recipe=recipe)
    output, expected = model(**inputs), source(**inputs)
    assert output.loss.item() == pytest.approx(expected.loss.item(), rel=0.01)
    error = (output.logits.float() - expected.logits).norm() / expected.logits.norm()
    assert error < (0.02 if recipe == "bf16" else 0.1)


def test_trainer_resumes_on_native_layers_as_if_it_had_not_stopped(tmp_path):
    rows, source = examples(4 * ROWS), hugging_face()
    options = {"rows": rows, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, **ON_GPU}
    expected = trained(te_models.convert(source), tmp_path, **options).values
    checkpoint = str(tmp_path / "checkpoint-2")
    model = te_models.from_pretrained(checkpoint)
    losses = trained(model, tmp_path / "again", rows=rows, max_steps=4, resume=checkpoint, **ON_GPU)
    assert losses.values == pytest.approx(expected[2:], rel=0.01)  # calibrates again
    model.save_pretrained(tmp_path / "saved")
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


@pytest.mark.parametrize("options", [{}, {"packing": True, "max_length": 64}])
def test_sft_trainer_trains_native_layers(options, tmp_path):
    test_library.compare_sft(tmp_path, tolerance=0.02, exact="bf16", **options, **ON_GPU)


def test_gradient_checkpointing_runs_on_native_layers():
    source, inputs = hugging_face(), {n: t.cuda() for n, t in batch(examples(ROWS)).items()}
    losses, gradients = [], []
    for enabled in (False, True):
        model = te_models.convert(source, recipe="current").train()
        if enabled:
            model.gradient_checkpointing_enable()
        loss = model(**inputs).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert losses[0] == losses[1]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-5)


def test_peft_adapts_the_weights_of_native_layers(tmp_path):
    test_library.train_peft(tmp_path)
