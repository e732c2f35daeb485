"""TE models as transformers models: the suite's losses, in a loop of one's own, Trainer and SFTTrainer."""

import gc
import json
import os
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
import torch.distributed as dist
from fp8_suite.core.errors import UserError
from fp8_suite.data.tokenizer import load_tokenizer
from fp8_suite.te_models.backend import te_module
from fp8_suite.te_models.build import build_model
from fp8_suite.te_models.kernels import flash_attention
from fp8_suite.te_models.options import BuildOptions
from fp8_suite.te_models.quantized.forms import FORMS
from fp8_suite.te_models.sources import TensorSource
from fp8_suite.te_models.spec import ModelSpec
from fp8_suite.te_models.weights import load_te, te_to_hf
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.export.quantize import quantize_export
from fp8_suite.training.library import build
from fp8_suite.training.library.inputs import decoder_inputs
from fp8_suite.training.parallel.strategies import Strategy
from fp8_suite.training.precision.recipes import Precision, build_autocast, make_recipe
from fp8_suite.training.precision.scaling import DelayedScalingState, Scaling, scaling_state
from fp8_suite.training.step import Stack, train_step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from fp8_suite import te_models
from tests.children import preload, run_ranks
from tests.training.parallel.jobs import same_bits

preload(__name__)

VOCABULARY, WIDTH, ROWS, STEPS = 64, 128, 2, 3
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True}
TEXTS = [{"text": f"Question {i}: what is {i} x {i}? {'Think. ' * i}It is {i * i}."} for i in range(12)]
RECIPES = ("fp32", "bf16", "delayed", "current", "block")


def hugging_face(model_type: str = "llama", **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES | changes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def examples(count: int = STEPS * ROWS) -> list[dict[str, torch.Tensor]]:
    """Rows with different numbers of labels."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(count):
        ids = torch.randint(3, VOCABULARY, (WIDTH,), generator=generator)
        labels = ids.clone()
        labels[: 5 + 7 * i] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def batch(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def suite_steps(source, recipe: str, rows, *, micro_batches: int = 1, backend: str = "emulated"):
    """Train the suite's own model with the suite's own steps; return it and the losses."""
    device, sizes = source.device, {"packed": False, "max_positions": 256}
    options = BuildOptions(te_backend=backend, device=device, dtype=torch.float32, **sizes)
    model = build_model(ModelSpec("tiny", source.config, None), options)
    load_te(model, TensorSource(source.state_dict()))
    settings = config_from_dict({}).precision
    te_recipe = None if recipe in ("bf16", "fp32") else make_recipe(recipe, settings, backend)
    precision = Precision(recipe, recipe, te_recipe=te_recipe, te_backend=backend)
    autocast = build_autocast(precision, device=device, parameter_dtype=torch.float32)
    strategy, optimizer = Strategy("single", device, config_from_dict({})), adamw(model)
    parts = {"wrapped": model, "optimizer": optimizer, "strategy": strategy, "autocast": autocast}
    state = DelayedScalingState(model=model, **parts, micro_batches=micro_batches, saved={})
    scaling = state if precision.needs_calibration else Scaling()
    stack = Stack(**parts, learning_rate=lambda step: 1e-3, total_steps=STEPS, scaling=scaling)
    losses, made = [], []
    for start in range(0, len(rows), ROWS):
        inputs = batch(rows[start : start + ROWS])
        inputs["labels"] = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
        inputs["position_ids"] = torch.arange(WIDTH).expand(ROWS, -1)
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        made.append(SimpleNamespace(inputs=inputs, label_tokens=int((inputs["labels"] != -100).sum())))
    rules = {"max_grad_norm": 0, "stop_requested": bool, "save_due": bool}
    for done in range(0, len(made), micro_batches):
        scaling.prepare(made[done])
        losses.append(train_step(stack, made[done : done + micro_batches], done=done, **rules).loss.item())
    return model, losses


def adamw(model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)


def weights(model) -> dict[str, torch.Tensor]:
    decoder = model.model.decoder if hasattr(model, "model") else model
    return {name: tensor.detach().clone() for name, tensor in te_to_hf(decoder, list)}


class Losses(TrainerCallback):
    def __init__(self):
        self.values = []

    def on_log(self, args, state, control, logs, **_):
        self.values += [logs["loss"]] if "loss" in logs else []


def arguments(folder, **changes) -> dict:
    return {
        **{"output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True, "seed": 0},
        **{"max_steps": STEPS, "per_device_train_batch_size": ROWS, "train_sampling_strategy": "sequential"},
        **{"learning_rate": 1e-3, "lr_scheduler_type": "constant", "optim": "adamw_torch_fused"},
        **{"max_grad_norm": 0.0, "weight_decay": 0.0, "logging_steps": 1, "save_strategy": "no"},
        **{"dataloader_pin_memory": False},
        **changes,
    }


def trained(model, folder, *, resume=None, rows=None, **changes) -> Losses:
    pytest.importorskip("accelerate")
    losses = Losses()
    options = TrainingArguments(**arguments(folder, **changes))
    trainer = Trainer(model=model, args=options, train_dataset=rows or examples(), callbacks=[losses])
    trainer.train(resume_from_checkpoint=resume)
    return losses


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_loop_of_ones_own_trains_as_the_suite(recipe):
    source, rows = hugging_face(), examples()
    reference, expected = suite_steps(source, recipe, rows)
    model = te_models.convert(source, recipe=recipe).train()
    optimizer, losses = adamw(model), []
    for start in range(0, len(rows), ROWS):
        loss = model(**batch(rows[start : start + ROWS])).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses == pytest.approx(expected, rel=1e-6) and len(set(losses)) == STEPS
    assert same_bits(weights(model), weights(reference))
    covered = {row.precision for row in model.coverage().rows if "layer" in row.modules and row.gemm_share}
    assert covered == {recipe if recipe in ("fp32", "bf16") else f"fp8 {recipe}"}


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_trainer_trains_as_the_suite(recipe, tmp_path):
    source, rows = hugging_face(), examples(2 * STEPS * ROWS)
    _, expected = suite_steps(source, recipe, rows, micro_batches=2)
    model = te_models.convert(source, recipe=recipe)
    losses = trained(model, tmp_path, rows=rows, gradient_accumulation_steps=2)
    assert losses.values == pytest.approx(expected, rel=1e-3 if recipe == "delayed" else 1e-6)
    assert model.coverage().fp8_modules == 3 * 2


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
def test_every_family_gives_the_loss_and_logits_of_transformers(model_type):
    source = hugging_face(model_type, **({"sliding_window": None} if model_type == "mistral" else {}))
    model, inputs = te_models.convert(source, recipe="fp32"), batch(examples(ROWS))
    for kwargs in ({}, {"num_items_in_batch": torch.tensor(50)}):
        output, expected = model(**inputs, **kwargs), source(**inputs, **kwargs)
        torch.testing.assert_close(output.loss, expected.loss)
        torch.testing.assert_close(output.logits, expected.logits, atol=1e-4, rtol=1e-4)
    assert model.train()(**inputs).logits is None
    assert model(input_ids=inputs["input_ids"]).logits.requires_grad


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_no_token(side):
    source, lengths = hugging_face(), (5, 12, 9)
    model = te_models.convert(source, recipe="fp32")
    ids, mask = torch.ones(3, 12, dtype=torch.int64), torch.zeros(3, 12, dtype=torch.int64)
    for row, length in enumerate(lengths):
        part = slice(12 - length, None) if side == "left" else slice(length)
        ids[row, part], mask[row, part] = torch.arange(3, 3 + length), 1
    output, expected = (m(input_ids=ids, attention_mask=mask).logits for m in (model, source))
    torch.testing.assert_close(output[mask == 1], expected[mask == 1], atol=1e-4, rtol=1e-4)
    mask[1, 6] = 0
    with pytest.raises(ValueError, match="zeros between tokens"):
        model(input_ids=ids, attention_mask=mask.bool())


def test_packed_sequences_do_not_see_each_other_and_odd_widths_are_padded_for_fp8():
    source, lengths = hugging_face(), (5, 20, 12)
    rows = [torch.arange(3, 3 + length) for length in lengths]
    packed = {"input_ids": torch.cat(rows)[None]}
    positions = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    from_trl = positions | {"cu_seq_lens_q": torch.tensor([0, 5, 25, 37]), "max_length_q": 20}
    for recipe, tolerance in (("fp32", 1e-5), ("block", 2e-2)):
        model = te_models.convert(source, recipe=recipe)
        alone = torch.cat([model(input_ids=row[None]).logits[0] for row in rows])
        for inputs in (positions, from_trl):
            logits = model(**packed, **inputs).logits[0]
            assert logits.shape == alone.shape
            torch.testing.assert_close(logits, alone, atol=tolerance, rtol=tolerance)
    inputs = decoder_inputs(packed["input_ids"], None, **positions, multiple=16)
    assert inputs["cu_seqlens"].tolist() == [0, 5, 25, 48] and inputs["max_seqlen"] == 48
    assert inputs["position_ids"][0, [4, 5, 24, 25, 36, 47]].tolist() == [4, 0, 19, 0, 11, 22]


def test_what_te_layers_do_not_compute_is_refused():
    model, ids = te_models.convert(hugging_face(), recipe="fp32"), torch.ones(1, 8, dtype=torch.int64)
    boundaries = {"cu_seq_lens_q": torch.tensor([0, 5, 8])}  # without position_ids
    for arguments_ in ({"inputs_embeds": torch.ones(1)}, {"output_hidden_states": True}, boundaries):
        with pytest.raises(TypeError, match=next(iter(arguments_))):
            model(input_ids=ids, **arguments_)
    windowed = te_models.convert(hugging_face("mistral", sliding_window=6), recipe="fp32")
    with pytest.raises(UserError, match="sliding window"):
        windowed(input_ids=ids)
    for recipe, reason in (
        ("delayd", "choose from delayed, .*, fp32"),
        ("rowwise", "choose from"),
        ("nvfp4", None),
    ):
        with pytest.raises(UserError, match=reason):
            te_models.convert(hugging_face(), recipe=recipe, backend="emulated")
    for recipe, dtype in (("fp32", torch.bfloat16), ("bf16", torch.float16)):
        with pytest.raises(UserError, match="weights are torch"):
            te_models.convert(hugging_face().to(dtype), recipe=recipe)
    with pytest.raises(UserError, match="key/value width 64"):
        te_models.convert(hugging_face(num_key_value_heads=2), recipe="block")


def test_gradient_checkpointing_changes_nothing_but_memory():
    source, inputs = hugging_face(), batch(examples(ROWS))
    results = []
    for enabled in (False, True):
        model = te_models.convert(source, recipe="delayed").train()
        if enabled:
            model.gradient_checkpointing_enable()
        loss = model(**inputs).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
        results[-1] += scaling_state(model.model.decoder).values()
    assert model.is_gradient_checkpointing and model.model.decoder.recompute == ["layer"] * 2
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    model.gradient_checkpointing_disable()
    model(**inputs)
    assert model.model.decoder.recompute == ["none"] * 2


def test_evaluation_leaves_the_scaling_state_as_it_is():
    model, inputs = te_models.convert(hugging_face()), batch(examples(ROWS))
    model.train()(**inputs).loss.backward()
    before = {name: t.clone() for name, t in scaling_state(model.model.decoder).items()}
    with torch.no_grad():
        model.eval()(**{name: t.roll(1, 1) for name, t in inputs.items()})
    assert before and same_bits(scaling_state(model.model.decoder), before)


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_saved_is_transformers_model_and_loads_here_again(tied, tmp_path):
    source = hugging_face("qwen2", tie_word_embeddings=tied)
    model, inputs = te_models.convert(source, recipe="current"), batch(examples(ROWS))
    model.save_pretrained(tmp_path)
    saved, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(saved) is type(source) and not info["missing_keys"] and not info["unexpected_keys"]
    assert same_bits(saved.state_dict(), source.state_dict())
    again = te_models.from_pretrained(str(tmp_path), recipe="current")
    assert same_bits(weights(again), weights(model))
    torch.testing.assert_close(again(**inputs).loss, model(**inputs).loss, rtol=0, atol=0)
    assert same_bits(weights(te_models.convert(model, recipe="bf16")), weights(model))
    fp32, bf16 = (te_models.convert(hugging_face(), recipe=recipe) for recipe in ("fp32", "bf16"))
    assert not fp32.load_state_dict(bf16.state_dict()).missing_keys


def test_dithered_weights_of_an_fp8_checkpoint_have_its_values_in_fp8(tmp_path):
    hugging_face().save_pretrained(tmp_path / "bf16")
    quantize_export(str(tmp_path / "bf16"), tmp_path / "fp8", FORMS["block"])
    exact, *dithered = (
        te_models.from_pretrained(str(tmp_path / "fp8"), recipe="block", dither_seed=seed)
        for seed in (None, 1, 1, 2)
    )
    assert same_bits(weights(dithered[0]), weights(dithered[1]))
    inputs = batch(examples(ROWS))
    for model in dithered[1:]:
        assert not same_bits(weights(model), weights(exact))
        torch.testing.assert_close(model(**inputs).loss, exact(**inputs).loss, rtol=0, atol=0)


@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_trainer_resumes_as_if_it_had_not_stopped(recipe, tmp_path):
    rows = examples(4 * ROWS)
    uninterrupted = te_models.convert(hugging_face(), recipe=recipe)
    expected = trained(uninterrupted, tmp_path, rows=rows, max_steps=4).values
    options = {"rows": rows, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trained(te_models.convert(hugging_face(), recipe=recipe), tmp_path, **options)
    checkpoint = str(tmp_path / "checkpoint-2")
    model = te_models.from_pretrained(checkpoint, recipe=recipe)
    losses = trained(model, tmp_path / "again", rows=rows, max_steps=4, resume=checkpoint).values
    if recipe == "delayed":  # calibrates again
        assert losses == pytest.approx(expected[2:], rel=0.01)
    else:
        assert losses == expected[2:] and same_bits(weights(model), weights(uninterrupted))


@pytest.mark.parametrize("options", [{}, {"packing": True, "max_length": 64}])
def test_sft_trainer_trains_as_with_transformers_layers(options, tmp_path):
    compare_sft(tmp_path, bf16=False, tolerance=1e-4, **options)


def tuned(model, folder, *, resume=None, peft_config=None, **options) -> list[float]:
    """Train by SFTTrainer and return the losses."""
    trl = pytest.importorskip("trl")
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**arguments(folder, **options)),
        train_dataset=datasets.Dataset.from_list(TEXTS),
        processing_class=load_tokenizer("demo", family="llama"),
        peft_config=peft_config,
    )
    trainer.train(resume_from_checkpoint=resume)
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def compare_sft(tmp_path, *, tolerance: float, exact: str = "fp32", **options) -> None:
    """Train by SFTTrainer with transformers' layers, and with TE's in high precision and FP8."""
    # The demo tokenizer's vocabulary. transformers does not train the embedding of a padding token.
    source = hugging_face(vocab_size=2048, pad_token_id=None)
    models = source, te_models.convert(source, recipe=exact), te_models.convert(source)
    losses = [tuned(model, tmp_path / str(number), **options) for number, model in enumerate(models)]
    assert losses[1] == pytest.approx(losses[0], rel=tolerance) and len(losses[0]) == STEPS
    assert losses[2] == pytest.approx(losses[0], rel=0.02) and losses[2] != losses[1]
    assert models[2].coverage().fp8_modules == 3 * 2


def test_accelerate_trains_and_resumes(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    rows, losses = examples(), {}
    for name in ("whole", "resumed"):
        accelerator = accelerate.Accelerator(cpu=True)
        model = te_models.convert(hugging_face(), recipe="current").train()
        model, optimizer = accelerator.prepare(model, adamw(model))
        if name == "resumed":
            accelerator.load_state(tmp_path)
        for step in range(1 if name == "resumed" else 0, STEPS):
            loss = model(**batch(rows[step * ROWS : (step + 1) * ROWS])).loss
            losses.setdefault(name, []).append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if name == "whole" and step == 0:
                accelerator.save_state(tmp_path)
    assert losses["resumed"] == losses["whole"][1:]


@pytest.mark.parametrize("as_native", [False, True])
def test_peft_adapts_the_weights_of_te_layers_by_parameter(as_native, tmp_path, monkeypatch):
    if as_native:  # peft takes the emulated modules for TE's, as it does if TE is installed
        dispatch = pytest.importorskip("peft.tuners.lora.te")
        monkeypatch.setattr(dispatch, "is_te_pytorch_available", lambda: True)
        emulated = SimpleNamespace(pytorch=te_module("emulated"))
        monkeypatch.setattr(dispatch, "te", emulated, raising=False)
        build.adapt_parameters_by_peft()
    train_peft(tmp_path)
    build.PEFT.close()


def train_peft(tmp_path) -> None:
    peft = pytest.importorskip("peft")
    model = te_models.convert(hugging_face(), recipe="current")
    inputs = {name: tensor.to(model.device) for name, tensor in batch(examples(ROWS)).items()}
    targets = ["layernorm_qkv.weight", "proj.weight", "layernorm_mlp.fc1_weight", "layernorm_mlp.fc2_weight"]
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=[], target_parameters=targets)
    adapted = peft.get_peft_model(model, lora).train()
    trained_parameters = [p for p in adapted.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained_parameters, lr=1e-2), []
    for _ in range(4):
        loss = adapted(**inputs).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses == sorted(losses, reverse=True) and len(trained_parameters) == 2 * 4 * 2
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).to(merged.device)
    torch.testing.assert_close(saved(**inputs).loss, merged.eval()(**inputs).loss, rtol=1e-2, atol=0)


def test_sft_trainer_trains_and_resumes_pefts_adapters(tmp_path):
    peft, source, losses = pytest.importorskip("peft"), hugging_face(vocab_size=2048, pad_token_id=None), []
    settings = {"bf16": False, "max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    lora = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": [], "target_parameters": ["proj.weight"]}
    for resume in (None, str(tmp_path / "checkpoint-2")):
        model = te_models.convert(source, recipe="current")
        adapters = peft.LoraConfig(**lora)
        losses.append(tuned(model, tmp_path, resume=resume, peft_config=adapters, **settings))
    assert losses[0] == losses[1] and model.coverage().fp8_modules == 3 * 2


def test_generation_without_a_cache_gives_the_tokens_of_transformers():
    source = hugging_face()
    model, ids = te_models.convert(source, recipe="fp32"), torch.arange(3, 13)[None]
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.generate(ids, use_cache=False, **options), source.generate(ids, **options))


def test_trainer_evaluates_the_loss_and_hands_over_logits(tmp_path):
    pytest.importorskip("accelerate")
    model, rows = te_models.convert(hugging_face()), examples(ROWS)
    options = TrainingArguments(**arguments(tmp_path, per_device_eval_batch_size=ROWS))
    shapes = []

    def metrics(prediction) -> dict:
        shapes.append(prediction.predictions.shape)
        return {}

    trainer = Trainer(model=model, args=options, eval_dataset=rows, compute_metrics=metrics)
    loss = trainer.evaluate()["eval_loss"]
    assert loss == model(**batch(rows)).loss.item() and shapes == [(ROWS, WIDTH, VOCABULARY)]


@pytest.mark.skipif(flash_attention.on_hopper(), reason="FlashAttention 4 may run")
def test_an_attention_that_failed_its_self_test_stays_off_in_the_process():
    build._choose_attention(hugging_face().config)
    build._choose_attention(hugging_face().config)
    gc.collect()
    assert os.environ["NVTE_FLASH_ATTN_V4"] == "0"
    build.ATTENTION.close()
    assert "NVTE_FLASH_ATTN_V4" not in os.environ


def train_on_ranks(rank: int, folder: Path, recipe: str, sharded: bool) -> None:
    """Train with one row a rank, by DDP or with FSDP2's shards; save the model and the losses."""
    model = te_models.convert(hugging_face(), recipe=recipe).train()
    mesh, wrapped = init_device_mesh("cpu", (dist.get_world_size(),)), model
    if sharded:
        for module in (*model.model.decoder.layers, model):
            fully_shard(module, mesh=mesh)
    else:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer, losses, rows = adamw(model), [], examples()
    for start in range(0, len(rows), ROWS):
        whole = batch(rows[start : start + ROWS])
        part = {name: tensor[rank : rank + 1] for name, tensor in whole.items()}
        items = (whole["labels"][:, 1:] != -100).sum()
        loss = wrapped(**part, num_items_in_batch=items).loss * ROWS
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        losses.append(loss.item() / ROWS)
    model.save_pretrained(folder / "saved", is_main_process=rank == 0)
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(losses))


@pytest.mark.parametrize(("recipe", "sharded"), [("delayed", False), ("current", True)], ids=["ddp", "fsdp"])
def test_two_ranks_train_as_the_suite_does_on_one(recipe, sharded, tmp_path):
    reference, expected = suite_steps(hugging_face(), recipe, examples())
    run_ranks(train_on_ranks, tmp_path, recipe, sharded)
    assert json.loads((tmp_path / "losses.json").read_text()) == pytest.approx(expected, rel=1e-3)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, tensor in weights(reference).items():
        assert (saved.get_parameter(name) - tensor).norm() < 0.04 * tensor.norm(), name
