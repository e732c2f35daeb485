"""benchmarks.peers: a stack trains, and leaves a run folder with its rates."""

from argparse import Namespace
from importlib import metadata

import pytest
import torch
from fp8_suite.benchmarks.peers import STACKS, TELayer, build, main, rope_angles, te_weights
from fp8_suite.benchmarks.records.runs import read_run
from fp8_suite.te_models import emulation as te
from fp8_suite.te_models.weights import fuse_qkv

CPU = torch.device("cpu")
TE_SHAPES = {  # parameters of te.TransformerLayer(256, 512, 4, num_gqa_groups=2, fuse_qkv_params=False, ...)
    "self_attention.layernorm_qkv.layer_norm_weight": (256,),
    "self_attention.layernorm_qkv.query_weight": (256, 256),
    "self_attention.layernorm_qkv.key_weight": (128, 256),
    "self_attention.layernorm_qkv.value_weight": (128, 256),
    "self_attention.proj.weight": (256, 256),
    "layernorm_mlp.layer_norm_weight": (256,),
    "layernorm_mlp.fc1_weight": (1024, 256),
    "layernorm_mlp.fc2_weight": (256, 512),
}


def llama() -> torch.nn.Module:
    """Build tiny-llama in float32, with norms far from ones."""
    torch.manual_seed(0)
    model = build(Namespace(model_name="tiny-llama", stack="torchao", precision="bf16"), CPU).float()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter.data, mean=float("norm" in name), std=0.1)
    return model


@pytest.mark.parametrize(
    ("precision", "micro_batches"), [(name, 3 if name == "bf16" else 1) for name in STACKS["torchao"]]
)
def test_a_peer_trains_and_records_its_rates(precision, micro_batches, tmp_path):
    sizes = "--model_name tiny-llama --max_seq_length 64 --batch_size 2 --steps 7"
    sizes += f" --gradient_accumulation_steps {micro_batches}" * (micro_batches > 1)
    flags = f"{sizes} --precision {precision} --device cpu --output_dir {tmp_path}"
    assert main(flags.split()) == 0
    stack = "transformers" if precision == "bf16" else "transformers+torchao"
    run = read_run(tmp_path / (f"{stack}-tiny-llama-{precision}-64x2" + "x3" * (micro_batches > 1)))
    rates = [rate for _, rate in run.series("perf/tokens_per_second")]
    assert run.value("recipe") == precision and run.value("steps") == 7 and not run.timed, "on a CPU"
    assert 2 / run.summary["tokens_per_second"] == pytest.approx(1 / rates[5] + 1 / rates[6])
    assert run.config["gradient_accumulation_steps"] == micro_batches
    assert run.environment["versions"]["torch"] == metadata.version("torch")
    assert all(7 < loss < 9 for _, loss in run.series("train/loss"))  # ln 2048 = 7.6


def test_te_layers_have_every_weight_of_llamas_layers():
    weights = te_weights(llama().model.layers[0])
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == TE_SHAPES


class EmulatedLayer(te.TransformerLayer):
    """TE's layer with its argument for weights that are cast once a step."""

    def forward(self, hidden, is_first_microbatch=None, **arguments):
        self.is_first_microbatch = is_first_microbatch
        return super().forward(hidden, **arguments)


def emulated(layer: torch.nn.Module) -> EmulatedLayer:
    sizes = {"num_gqa_groups": 2, "kv_channels": 64, "layernorm_epsilon": 1e-5}
    te_layer, weights = EmulatedLayer(256, 512, 4, **sizes), te_weights(layer)
    qkv = (weights.pop(f"self_attention.layernorm_qkv.{name}_weight") for name in ("query", "key", "value"))
    weights["self_attention.layernorm_qkv.weight"] = fuse_qkv(*qkv, heads=4, groups=2)
    for name, parameter in te_layer.named_parameters():
        parameter.data = weights.pop(name)
    assert not weights
    return te_layer


def test_te_layers_compute_what_llamas_layers_do():
    model, ids = llama(), torch.randint(2048, (2, 48))
    inv_freq = model.model.rotary_emb.inv_freq
    inv_freq /= torch.arange(1, len(inv_freq) + 1)  # other than the default, as Llama 3.1's are
    with torch.no_grad():
        expected = model.model(input_ids=ids, use_cache=False).last_hidden_state
        layers = [TELayer(emulated(layer), rope_angles(model, 48)) for layer in model.model.layers]
        model.model.layers = torch.nn.ModuleList(layers)
        actual = model.model(input_ids=ids, use_cache=False, is_first_microbatch=True).last_hidden_state
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert all(layer.layer.is_first_microbatch for layer in layers)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model_name tiny-llama --steps 5", "--steps 5: must be at least 6"),
        ("--model_name tiny-lama", "did you mean 'tiny-llama'?"),
        ("--model_name tiny-llama --steps 7", "--device cuda: no GPU"),
        ("--model_name tiny-llama --stack te", "--stack te: Transformer Engine needs a CUDA GPU"),
        ("--model_name tiny-llama --stack te --device cpu", "--stack te --model_name tiny-llama --device c"),
        ("--model_name tiny-qwen2 --stack te", "--stack te --model_name tiny-qwen2 --device cuda: "),
        ("--model_name tiny-llama --stack te --precision rowwise", "use bf16, delayed"),
        ("--model_name tiny-llama --precision delayed", "--stack torchao --precision delayed: use bf16, "),
    ],
)
def test_bad_input_is_one_line(flags, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([*flags.split(), "--output_dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())
