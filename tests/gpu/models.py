"""Small models and batches for the tests, with sizes that every recipe supports."""

from dataclasses import replace
from pathlib import Path

import torch
from fp8_suite.data.collate import Sample, build_batch
from fp8_suite.te_models.build import build_model
from fp8_suite.te_models.options import BuildOptions
from fp8_suite.te_models.spec import ModelSpec, weight_source
from safetensors.torch import save_file
from transformers import AutoConfig

DEVICE = torch.device("cuda", 0)
OWN_SETTINGS = {
    "llama": {"head_dim": 64},
    "qwen3": {"head_dim": 128},
    "mistral": {"sliding_window": None},
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def spec(
    *,
    family: str = "llama",
    tied: bool = False,
    scaled_rope: bool = True,
    layers: int = 4,
    init_std: float = 0.03,
) -> ModelSpec:
    config = AutoConfig.for_model(
        family,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=2048,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        # Larger than 0.02: larger logits reveal a swapped head or a wrong RoPE angle.
        initializer_range=init_std,
        tie_word_embeddings=tied,
        rope_parameters=LLAMA3_ROPE if scaled_rope else {"rope_type": "default", "rope_theta": 10000.0},
        **OWN_SETTINGS.get(family, {}),
    )
    return ModelSpec(f"test-{family}", config, None)


def perturbed(model_spec: ModelSpec, folder: Path) -> ModelSpec:
    """Save the model's weights with random norms and biases to `folder`; all values are exact in BF16."""
    source = weight_source(model_spec, seed=0, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, shape in source.shapes().items():
        noise = 0.3 * torch.randn(shape, generator=generator) if len(shape) == 1 else 0.0
        tensors[name] = (source.get(name) + noise).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model_spec.config.save_pretrained(folder)
    return replace(model_spec, weights=folder)


def build(model_spec: ModelSpec, *, use_te: bool, packed: bool, backend: str = "native", **options):
    defaults = {"dtype": torch.bfloat16, "device": DEVICE, "max_positions": 2048}
    te_backend = backend if use_te else None
    return build_model(model_spec, BuildOptions(te_backend=te_backend, packed=packed, **defaults | options))


def batch(
    lengths: list[list[int]],
    *,
    packed: bool,
    seed: int = 0,
    vocab: int = 2048,
    device: torch.device = DEVICE,
) -> dict:
    """Create rows of samples with these lengths; two of three tokens have labels, the last has none."""
    generator = torch.Generator().manual_seed(seed)

    def sample(length: int) -> Sample:
        ids = torch.randint(0, vocab, (length,), generator=generator)
        return Sample(ids.int().numpy(), (torch.arange(length) % 3 != 1).numpy(), 0)

    rows, width = [[sample(length) for length in row] for row in lengths], max(map(sum, lengths))
    return build_batch(rows, width, pad_id=0, max_seqlen=width if packed else None).to(device).inputs
