"""Adapters as peft reads them, and merged exports, against peft."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from fp8_suite.core.errors import EXIT_BAD_SETTING
from fp8_suite.te_models.build import build_model, export_tensors
from fp8_suite.te_models.lora.adapters import hf_adapters
from fp8_suite.te_models.lora.merge import gather_adapters, merged, peft_config, peft_tensors
from fp8_suite.te_models.spec import find_model, from_config, weight_source
from fp8_suite.training.config import Config
from fp8_suite.training.export.write import export_adapter
from safetensors.torch import load_file

from tests.children import preload
from tests.te_models.test_lora import IDS, LORA, OPTIONS, SOME, SPECS
from tests.training.parallel.jobs import curve, record
from tests.training.parallel.jobs import train as train_on_ranks
from tests.training.test_run import train

preload(__name__)

peft = pytest.importorskip("peft")


def load(weights, spec, folder):
    """Return transformers' model with these weights and the adapter in `folder`, by peft, which loads all."""
    base = from_config(spec, torch.float32)
    base.load_state_dict(weights, strict=False)  # without a tied LM head
    model = peft.PeftModel.from_pretrained(base, folder)
    stored, loaded = load_file(folder / "adapter_model.safetensors"), peft.get_peft_model_state_dict(model)
    assert stored.keys() == loaded.keys() and all(torch.equal(stored[name], loaded[name]) for name in stored)
    return model


def assert_within_rounding(exported, expected):
    """Assert that BF16 weights differ from the sums in FP32 by half a unit in the last place at most."""
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor.float(), expected[name].float(), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("te_backend", [None, "emulated"])
@pytest.mark.parametrize(("family", "targets"), [("qwen3", "all"), ("qwen2", SOME)])
def test_peft_computes_and_merges_the_same(te_backend, family, targets, tmp_path):
    spec, lora = SPECS[family], replace(LORA, lora_targets=targets)
    model = build_model(spec, replace(OPTIONS, te_backend=te_backend, lora=lora))
    for module in hf_adapters(model).values():
        torch.nn.init.normal_(module.lora_b, std=0.1)
    adapters = gather_adapters(model, lambda tensors: [tensor.detach() for tensor in tensors])
    config = peft_config(adapters, lora, base="test", layers=spec.config.num_hidden_layers)
    assert len(config["target_modules"]) == (7 if targets == "all" else len(adapters))
    folder = export_adapter(tmp_path / "adapter", peft_tensors(adapters), config)

    base = {name: tensor.detach() for name, tensor in export_tensors(model)}
    theirs = load(base, spec, folder)
    with torch.no_grad():
        logits = theirs(IDS[0], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), IDS[0].flatten(), reduction="sum")
        assert model(IDS[0], IDS[0]).loss.item() == pytest.approx(loss.item(), rel=1e-6)
        if te_backend is None:
            ours = model.model(IDS[0], use_cache=False).logits
            torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-5)
    exported = {n: t.bfloat16() for n, t in merged(base.items(), adapters, lora.scaling)}
    expected = theirs.merge_and_unload().state_dict()
    changed = {name for name in exported if not torch.equal(exported[name], base[name].bfloat16())}
    assert changed == {f"{name}.weight" for name in adapters}
    assert_within_rounding(exported, expected)


@pytest.mark.parametrize("layers", ["", "--use_te --te_backend emulated --mixed_precision fp8"])
def test_a_run_ends_with_an_adapter_and_a_merged_export(layers, tmp_path, capsys):
    folder = train(tmp_path / "run", f"{layers} --lora_rank 4 --learning_rate 1e-2 --max_steps 3")
    spec = find_model("tiny-llama", init="random", use_te=False)
    source = weight_source(spec, seed=Config().optim.seed, device=torch.device("cpu"))
    base = {name: source.get(name) for name in source.shapes()}
    expected = load(base, spec, folder / "adapter").merge_and_unload().state_dict()
    exported = load_file(folder / "export" / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in exported.values())
    assert_within_rounding(exported, expected)
    summary = record(folder, "summary.json")
    trained = sum(t.numel() for t in load_file(folder / "adapter" / "adapter_model.safetensors").values())
    assert summary["trainable_parameters"] == trained and "parameters train" in capsys.readouterr().out


def test_ranks_export_what_one_device_exports(tmp_path):
    flags = "--lora_rank 4 --max_steps 2 --recompute layer --gradient_accumulation_steps 2"
    one, two = train(tmp_path / "one", f"{flags} --batch_size 4"), tmp_path / "two"
    train_on_ranks(two, f"{flags} --batch_size 2 --sharding_mode fsdp_full", ranks=2)
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        assert curve(two, name) == pytest.approx(curve(one, name), rel=5e-5 if "norm" in name else 1e-5)
    for file in ("adapter/adapter_model.safetensors", "export/model.safetensors"):
        expected, actual = load_file(one / file), load_file(two / file)
        assert expected.keys() == actual.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(actual[name], tensor, rtol=2**-7, atol=1e-4)
    config = "adapter/adapter_config.json"
    assert (one / config).read_text() == (two / config).read_text()


def test_a_folder_of_something_else_is_kept(tmp_path, capsys):
    folder = train(tmp_path / "run", "--lora_rank 4 --max_steps 1 --no_export")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "notes.txt").write_text("mine")
    train(folder, "--lora_rank 4 --max_steps 1", code=EXIT_BAD_SETTING)
    assert "adapter/ was not exported" in capsys.readouterr().err
