"""Small models that only transformers can read: a mixture of experts, and one that sees images, too."""

from pathlib import Path

import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
)


def save_mixture(folder: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 2048}
    MixtralForCausalLM(MixtralConfig(**sizes)).save_pretrained(folder)


def save_model_with_images(folder: Path) -> None:
    """A model whose text alone is trained: its parameters for images get no gradient."""
    torch.manual_seed(0)
    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 2048, "pad_token_id": None}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
