"""Levels of recomputation with TE's own layers: gradients, kernels that run again, memory."""

import functools
import gc

import pytest
import torch
from fp8_suite.core.patches import TE_ATTENTION, TE_GEMMS
from fp8_suite.te_models.kernels import flash_attention
from fp8_suite.te_models.options import NativeOptions
from fp8_suite.te_models.recompute import offload
from fp8_suite.te_models.settings import RECOMPUTE_LEVELS
from fp8_suite.te_models.shape import ModelShape
from fp8_suite.te_models.spec import ModelSpec
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.estimate.activations import kept_activations
from fp8_suite.training.estimate.memory import fp8_copies
from fp8_suite.training.estimate.setup import ModelSize, TrainingSetup
from fp8_suite.training.optim.optimizer import choose_optimizer
from fp8_suite.training.precision.scaling import scaling_state
from fp8_suite.training.precision.te_runtime import attention_backend
from transformers import LlamaConfig

from tests.gpu.models import DEVICE, batch, build, spec
from tests.gpu.test_te_model import bf16, fp8

pytestmark = pytest.mark.gpu
LEVELS = RECOMPUTE_LEVELS[1:]
LAYERS = 4


def autocast_of(name: str):
    return bf16() if name == "bf16" else fp8(name)


def train(name: str, *, packed: bool, steps: int = 3, family: str = "llama", **options):
    """Return losses, gradients and scales of some steps of two micro-batches each."""
    autocast = autocast_of(name)
    model = build(spec(family=family, layers=LAYERS), use_te=True, packed=packed, **options)
    lengths = [[100, 156]] * 8 if packed else [[256]] * 8
    tensors = []
    for step in range(steps):
        for micro_batch in range(2):
            model.first_micro_batch = micro_batch == 0
            with autocast():
                loss = model(**batch(lengths, packed=packed, seed=2 * step + micro_batch)).loss
            loss.backward()
            tensors.append(loss.detach())
        tensors += [p.grad.clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p -= 1e-5 * p.grad
                p.grad = None
    return [*tensors, *scaling_state(model).values()]


@pytest.mark.parametrize("name", ["bf16", "delayed", "current", "block"])
@pytest.mark.parametrize("recompute", [*LEVELS, "cheap:1+full:1+mlp:1"])
def test_every_level_equals_no_recomputation_bit_for_bit(name, recompute, monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    native = {"native": NativeOptions(cache_fp8_weights=name != "delayed")}
    expected = train(name, packed=False, **native)
    actual = train(name, packed=False, recompute=recompute, **native)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("recompute", [*LEVELS, "layer:2"])
def test_offloaded_activations_return_unchanged(recompute, monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    monkeypatch.setattr(offload, "SMALLEST", 2**12)
    options = {"packed": False, "recompute": recompute}
    expected = train("delayed", **options)
    actual = train("delayed", **options, offload_activations=True)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_offloaded_activations_leave_the_gpu():
    inputs, kept, buffers = batch([[2048]] * 8, packed=False), {}, set()
    for offloads in (False, True):
        options = {"recompute": "layer", "offload_activations": offloads}
        model = build(spec(layers=8), use_te=True, packed=False, **options)
        gc.collect()  # the model before
        for _ in range(2):
            before = torch.cuda.memory_allocated(DEVICE)
            with bf16()():
                loss = model(**inputs).loss
            kept[offloads] = torch.cuda.memory_allocated(DEVICE) - before
            loss.backward()
            if offloads:
                assert not (model.offload.stored or model.offload.leaving)
                buffers.add(sum(map(len, model.offload.free.values())))
        del model, loss
    layer = 8 * 2048 * 512 * 2 * 2  # bytes of a layer's input and attention output
    assert kept[False] - kept[True] == pytest.approx(6 * layer, rel=0.05)
    assert len(buffers) == 1, "the second pass reuses the host buffers of the first"


@pytest.fixture(params=["fused", "flash"])
def attention(request):
    """TE's attention: "fused" is cuDNN's, "flash" is FlashAttention 4."""
    if request.param == "flash" and (reason := flash_attention.why_not(64)):
        pytest.skip(reason)
    switches = {"fused": flash_attention.disabled_in_te, "flash": flash_attention.enabled_in_te}
    with switches[request.param]():
        yield request.param


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("recompute", LEVELS)
def test_levels_of_packed_batches_equal_no_recomputation_bit_for_bit(
    family, recompute, attention, monkeypatch
):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    expected = train("delayed", packed=True, steps=1, family=family)
    actual = train("delayed", packed=True, steps=1, family=family, recompute=recompute)
    assert attention_backend() == attention
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize(
    ("level", "gemms", "attentions"), [("cheap", 0, 0), ("mlp", 1, 0), ("layer", 3, 0), ("full", 3, 1)]
)
def test_a_level_runs_only_its_kernels_again(level, gemms, attentions, attention):
    ran = {"gemm": 0, "attention": 0}

    def count(kind, kernel):
        @functools.wraps(kernel)
        def run(*args, **kwargs):
            ran[kind] += "layout" not in kwargs  # not a GEMM of backward
            return kernel(*args, **kwargs)

        return run

    with (
        TE_GEMMS.on(functools.partial(count, "gemm")),
        TE_ATTENTION.on(functools.partial(count, "attention")),
    ):
        train("delayed", packed=True, steps=1, recompute=f"{level}:3")
    assert attention_backend() == attention
    assert ran["gemm"] == 2 * (4 * LAYERS + 3 * gemms)
    assert ran["attention"] == 2 * (LAYERS + 3 * attentions)


SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
}


@pytest.mark.parametrize("name", ["bf16", "delayed"])
def test_levels_keep_the_predicted_memory(name):
    """Compare what a forward pass keeps, less what it keeps at `full`, with the memory model."""
    config = LlamaConfig(**SIZES, num_hidden_layers=LAYERS, initializer_range=0.02)
    inputs, kept = batch([[2048]] * 4, packed=False), {}
    for level in RECOMPUTE_LEVELS:
        model = build(ModelSpec("test", config, None), use_te=True, packed=False, recompute=level)
        gc.collect()  # the model before
        for _ in range(2):  # the first pass allocates workspaces
            before = torch.cuda.memory_allocated(DEVICE)
            with autocast_of(name)():
                loss = model(**inputs).loss
            kept[level] = torch.cuda.memory_allocated(DEVICE) - before
            loss.backward()
        del model, loss
    precision = {"mixed_precision": "bf16"} if name == "bf16" else {"mixed_precision": "fp8"}
    cfg = config_from_dict({"use_te": True, "batch_size": 4, "max_seq_length": 2048, **precision})
    size = ModelSize(10**8, ModelShape.from_hf_config(config))
    job = TrainingSetup(cfg, size, choose_optimizer(cfg, "single", on_gpu=True), "single", 1, 1)
    for level in RECOMPUTE_LEVELS:
        more = kept[level] - kept["full"]
        predicted = LAYERS * (kept_activations(job, level) - kept_activations(job, "full"))
        predicted += fp8_copies(job) * (level == "none")
        assert more == pytest.approx(predicted, rel=0.05, abs=2e6), level
