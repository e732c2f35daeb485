"""What casting gradients of logits to E5M2 does to the LM head's gradients, on a small Llama, on a CPU.

    PYTHONPATH=. python benchmarks/results/lm-head-gradient/measure.py FOLDER

trains it in BF16 on a folder with a split train_1M in OpenMathInstruct-2's columns, then compares gradients
over 40 further batches at the same weights: exact ones; from operands in FP8 with exact gradients of logits;
with those cast, labels and all; and those of `training.loss_fp8`, which keeps a label's apart.
"""

import sys

import datasets
import torch
from training.loss import linear_cross_entropy, softmax_cross_entropy, softmax_gradient
from training.loss_fp8 import E5M2, GRADIENT_SCALE, cast
from transformers import LlamaConfig, LlamaModel

from data.chat import load_tokenizer

WIDTH, VOCAB, LENGTH, BATCH, STEPS, BATCHES = 192, 2048, 256, 8, 600, 40


def tokens(folder: str) -> torch.Tensor:
    tokenizer = load_tokenizer("demo", family="llama")
    rows = datasets.load_dataset(folder, split="train_1M")
    texts = (f"{row['problem']}\n{row['generated_solution']}\n" for row in rows)
    return torch.tensor([token for text in texts for token in tokenizer(text)["input_ids"]])


def logits_gradient(kind: str, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    exact = softmax_gradient(logits, labels, softmax_cross_entropy(logits, labels)[2])
    if kind in ("exact", "operands in FP8"):
        return exact
    return (exact * GRADIENT_SCALE).to(E5M2).float() / GRADIENT_SCALE


def shipped(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    operands = [tensor.detach().clone().requires_grad_() for tensor in (hidden, weight)]
    linear_cross_entropy(*operands, labels, fp8=True).loss.backward()
    return [tensor.grad.float() for tensor in operands]


def main() -> None:
    torch.manual_seed(0)
    stream = tokens(sys.argv[1])
    sizes = {"hidden_size": WIDTH, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    model = LlamaModel(LlamaConfig(**sizes, **heads))
    weight = model.embed_tokens.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    order = torch.randperm((len(stream) - 1) // LENGTH)

    def forward(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = order[(torch.arange(BATCH) + step * BATCH) % len(order)] * LENGTH
        with torch.autocast("cpu", torch.bfloat16):
            x = torch.stack([stream[at : at + LENGTH] for at in chosen])
            hidden = model(input_ids=x).last_hidden_state.reshape(-1, WIDTH).bfloat16()
        return hidden, torch.cat([stream[at + 1 : at + LENGTH + 1] for at in chosen])

    for step in range(STEPS):
        hidden, labels = forward(step)
        loss = linear_cross_entropy(hidden, weight.bfloat16(), labels).loss / len(labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"{STEPS} steps of {BATCH} x {LENGTH} tokens, loss {loss.item():.2f}")
    w = weight.detach().bfloat16()
    low_w = cast(w)
    kinds = ("exact", "operands in FP8", "label too", "label apart")
    by_weight, errors = {kind: torch.zeros(VOCAB, WIDTH) for kind in kinds}, dict.fromkeys(kinds, 0.0)
    for step in range(STEPS, STEPS + BATCHES):
        with torch.no_grad():
            hidden, labels = forward(step)
        low_h = cast(hidden)
        found = {"label apart": shipped(hidden, w, labels)}
        for kind in kinds[:3]:
            h = hidden.float() if kind == "exact" else low_h.rows.float() * low_h.inverse
            v = w.float() if kind == "exact" else low_w.rows.float() * low_w.inverse
            gradient = logits_gradient(kind, (h @ v.T).bfloat16(), labels)
            found[kind] = [gradient @ v, gradient.T @ h]
        reference = found["exact"][0]
        for kind in kinds:
            errors[kind] += ((found[kind][0] - reference).norm() / reference.norm()).item() / BATCHES
            by_weight[kind] += found[kind][1]
    true = by_weight["exact"]
    print("gradient of the hidden states: error; mean gradient of the weight: size along the true one, and")
    print("the norm of its sum over the vocabulary over its own")
    for kind, found in by_weight.items():
        along = (found * true).sum() / true.square().sum()
        print(f"{kind:>16}: {errors[kind]:.4f}; {along:.4f}, {found.sum(0).norm() / true.norm():.4f}")


if __name__ == "__main__":
    main()
