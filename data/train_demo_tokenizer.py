"""Trains the embedded tokenizer: `python -m data.train_demo_tokenizer [FOLDER]`, the same files every time.

Byte-level BPE over the demo's problems, with Llama 3's special tokens and chat format. All 256 bytes are
in the vocabulary, so any text can be written with it, if not as briefly.
"""

from __future__ import annotations

import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from data.chat import TEMPLATES
from data.demo import SIZES, TOKENIZER_DIR, generate
from data.settings import SYSTEM_PROMPT

VOCAB_SIZE = 2048
SPECIAL_TOKENS = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|finetune_right_pad_id|>",
]


def train() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [row[key] for row in generate("train_1M") for key in ("problem", "generated_solution")]
    tokenizer.train_from_iterator([SYSTEM_PROMPT, "system user assistant", *texts], trainer)
    # As Llama 3's own tokenizer does, encoding adds the BOS that the chat template writes too.
    bos = SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token="<|eot_id|>",
        pad_token="<|finetune_right_pad_id|>",
        additional_special_tokens=SPECIAL_TOKENS[1:4],
        chat_template=TEMPLATES["llama"].text,
        clean_up_tokenization_spaces=False,
        model_max_length=2**30,
    )


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else TOKENIZER_DIR
    tokenizer = train()
    tokenizer.save_pretrained(folder, save_jinja_files=False)  # one config file holds the template too
    print(f"{len(tokenizer)} tokens from {SIZES['train_1M']} problems, written to {folder}")
