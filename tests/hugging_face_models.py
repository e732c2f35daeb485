"""Small models that only transformers can read: a mixture of experts, and one that sees images, too."""

import copy
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, MixtralConfig, MixtralForCausalLM


def save_mixture(folder: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 2048}
    MixtralForCausalLM(MixtralConfig(**sizes)).save_pretrained(folder)


TEXT = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 2048, "pad_token_id": None},
}
# Image encoders have more layers than the text's decoder.
VISION = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14},
}
QWEN_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
QWEN_VISION = {"depth": 4, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
WITH_IMAGES = {
    "gemma3": {"text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 4},
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
        "vision_config": VISION | {"model_type": "pixtral"},
    },
    "qwen2_5_vl": {
        "text_config": TEXT | {"rope_parameters": QWEN_ROPE},
        "vision_config": QWEN_VISION | {"fullatt_block_indexes": [1]},
    },
}


def save_model_with_images(folder: Path, model_type: str = "gemma3") -> None:
    """A model whose text alone is trained: its parameters for images get no gradient."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **copy.deepcopy(WITH_IMAGES[model_type]))
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
