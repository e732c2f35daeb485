"""A small mixture of experts, whose files transformers joins while it reads them."""

from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM


def save_mixture(folder: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 2048}
    MixtralForCausalLM(MixtralConfig(**sizes)).save_pretrained(folder)
