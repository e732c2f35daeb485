"""Train the demo tokenizer; the result is deterministic.

    python -m data.train_demo_tokenizer [FOLDER]

Byte-level BPE trained on the demo problems, with the special tokens and chat format of Llama 3. The
vocabulary has all 256 bytes, so it can encode any text.
"""

from __future__ import annotations

import sys

from fp8_suite.data.demo import TOKENIZER_DIR, read_demo
from fp8_suite.data.settings import SYSTEM_PROMPT
from fp8_suite.data.tokenizer import LLAMA3
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<|begin_of_text|>", "<|end_of_text|>", *LLAMA3.markers, LLAMA3.pad]


def train() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    texts = [row[key] for row in read_demo("train_1M") for key in ("problem", "generated_solution")]
    tokenizer.train_from_iterator([SYSTEM_PROMPT, "system user assistant", *texts], trainer)
    # Like Llama 3's tokenizer, it adds BOS, although the chat template has one too.
    bos = SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token="<|eot_id|>",
        pad_token=LLAMA3.pad,
        additional_special_tokens=SPECIAL_TOKENS[1:4],
        chat_template=LLAMA3.text,
        clean_up_tokenization_spaces=False,
        model_max_length=2**30,
    )


if __name__ == "__main__":
    train().save_pretrained(*(sys.argv[1:] or [TOKENIZER_DIR]), save_jinja_files=False)
