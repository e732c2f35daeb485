"""FLOPs against numbers worked out by hand."""

import pytest
import torch
import transformers
from fp8_suite.te_models.shape import ModelShape, attention_flops, matmul_parameters, model_flops

LLAMA_8B = ModelShape(4096, 32, 32, 8, 128, 14_336, 128_256)
# Small enough for a pencil; every dimension differs, so no two can be confused.
SMALL = ModelShape(10, 2, num_heads=4, num_kv_heads=2, head_dim=3, ffn_hidden_size=7, vocab_size=11)
DIMENSIONS = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
DIMENSIONS |= {"intermediate_size": 14336, "vocab_size": 128256, "num_key_value_heads": 8}


def test_matmul_parameters():
    # q and o 2*10*12 = 240, k and v 2*10*6 = 120, MLP 3*10*7 = 210: 570 a layer; LM head 110.
    assert matmul_parameters(SMALL) == 2 * 570 + 110
    # 8,030,261,248 parameters, less the embedding 525,336,576 and 65 norms of 4096.
    assert matmul_parameters(LLAMA_8B) == 8_030_261_248 - 525_336_576 - 65 * 4096
    config = transformers.Qwen3Config(**DIMENSIONS, head_dim=64, tie_word_embeddings=False)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    in_gemms = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert matmul_parameters(ModelShape.from_hf_config(config)) == in_gemms


def test_model_flops():
    assert attention_flops(SMALL, sum_squared_lengths=4 + 9) == 6 * 2 * 12 * 13
    assert model_flops(SMALL, tokens=5, sum_squared_lengths=13) == 37_500 + 1872
    flops = model_flops(LLAMA_8B, tokens=8192, sum_squared_lengths=8192**2)
    assert flops / 8192 == pytest.approx(51.47e9, abs=0.005e9)
    packed = model_flops(LLAMA_8B, tokens=8192, sum_squared_lengths=8 * 1024**2)
    # 6 * 32 layers * 4096 * (8192^2 - 8*1024^2)
    assert flops - packed == 786_432 * 58_720_256
    frozen = model_flops(SMALL, tokens=5, sum_squared_lengths=13, adapters=10)
    assert frozen == 37_500 * 4 / 6 + 6 * 10 * 5 + 1872


def test_shape_from_hf_config():
    llama = transformers.LlamaConfig(**DIMENSIONS)
    assert ModelShape.from_hf_config(llama) == LLAMA_8B
    llama.head_dim = None
    assert ModelShape.from_hf_config(llama) == LLAMA_8B
    # Qwen2 has no head_dim at all; Qwen3's is not hidden_size / num_heads.
    assert ModelShape.from_hf_config(transformers.Qwen2Config(**DIMENSIONS)) == LLAMA_8B
    qwen3 = transformers.Qwen3Config(hidden_size=1024, num_attention_heads=16, head_dim=128)
    assert ModelShape.from_hf_config(qwen3).head_dim == 128
    assert ModelShape.from_hf_config(transformers.MixtralConfig()) is None


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (transformers.MistralConfig(sliding_window=4096), 4096),
        (transformers.MistralConfig(sliding_window=None), None),
        (transformers.Qwen3Config(sliding_window=4096), None),  # not in use
        (transformers.Qwen3Config(sliding_window=4096, use_sliding_window=True, max_window_layers=1), 4096),
        (transformers.Gemma2Config(sliding_window=4096), 4096),
        (transformers.LlamaConfig(), None),
    ],
)
def test_a_sliding_window_limits_what_attention_sees(config, window):
    shape = ModelShape.from_hf_config(config)
    assert shape.window == window
    assert shape.sees_all(4096) and shape.sees_all(4097) == (window is None)
