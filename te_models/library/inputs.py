"""Batches of transformers as inputs of `TECausalLM.hidden_states`.

B rows, S tokens per row, N sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError
from torch import Tensor

# Arguments of transformers' models that do not change what TE layers compute. There is no cache of keys and
# values; boundaries of packed sequences are read from `position_ids` or `cu_seq_lens_q`.
WITHOUT_EFFECT = {"use_cache", "return_dict", "cache_position", "seq_idx"}
WITHOUT_EFFECT |= {"cu_seq_lens_k", "max_length_q", "max_length_k"}


def require_known(arguments: dict[str, Any]) -> None:
    """Raise TypeError for an argument that TE layers do not support, unless it is None or False."""
    for name, value in arguments.items():
        if name not in WITHOUT_EFFECT and value is not None and value is not False:
            raise TypeError(f"{name}: not supported by models of TE layers")


def decoder_inputs(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seq_lens: Tensor | None,
    *,
    multiple: int,
) -> dict[str, Any]:
    """Return the inputs of `TECausalLM.hidden_states`, rows padded to a multiple of `multiple` tokens.

    `input_ids` [B, S]; the others as in transformers: a mask [B, S] of padding on either side, positions
    [B, S] that restart with each packed sequence, or boundaries [N+1] of sequences in a single row.
    """
    rows, width = input_ids.shape
    starts = _sequence_starts(input_ids, attention_mask, position_ids, cu_seq_lens)
    padding = -width % multiple
    if padding:
        input_ids = torch.cat([input_ids, input_ids[:, -1:].expand(-1, padding)], 1)
    width += padding
    index = torch.arange(width, device=input_ids.device).expand(rows, -1)
    if starts is None:
        cu_seqlens = torch.arange(0, rows * width + 1, width, dtype=torch.int32, device=input_ids.device)
        inputs = {"position_ids": index}
    else:
        starts = torch.cat([starts, index[:, width - padding :] == width - padding], 1)
        firsts = starts.flatten().nonzero().flatten()
        cu_seqlens = torch.cat([firsts, firsts.new_tensor([rows * width])]).int()
        inputs = {"position_ids": index - torch.where(starts, index, 0).cummax(1).values}
    return inputs | {"input_ids": input_ids, "cu_seqlens": cu_seqlens, "max_seqlen": width}


def _sequence_starts(
    input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cu_seq_lens: Tensor | None
) -> Tensor | None:
    """Return True [B, S] at the first token of each sequence, or None if every row is one sequence.

    Padding before a sequence is a sequence of its own. Padding behind it needs no mask: attention is causal.
    """
    starts = torch.zeros_like(input_ids, dtype=torch.bool)
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            raise _bad_mask(f"its shape is {list(attention_mask.shape)}, not that of input_ids")
        mask = attention_mask.bool()
        starts[:, 1:] = mask[:, 1:] & ~mask[:, :-1]
        if (starts[:, 1:] & mask[:, :-1].cumsum(1).bool()).any():
            raise _bad_mask("it hides tokens inside a sequence; mask padding only")
    if position_ids is not None:
        starts[:, 1:] |= position_ids.expand_as(input_ids).diff() != 1
    elif cu_seq_lens is not None:
        starts[0, cu_seq_lens[:-1].long()] = True
    if (attention_mask is None and position_ids is None and cu_seq_lens is None) or not starts[:, 1:].any():
        return None
    starts[:, 0] = True
    return starts


def _bad_mask(reason: str) -> UserError:
    return UserError(f"attention_mask: {reason}", flags=["attention_mask"], exit_code=EXIT_BAD_SETTING)
