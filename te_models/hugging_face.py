"""The model as transformers implements it, behind the same call as the TE model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from te_models.weights import Gather
from training.loss import TokenLoss, linear_cross_entropy, logits_cross_entropy

# Families whose logits are plainly `lm_head(hidden)`; others (scaled or capped logits) keep their own head.
PLAIN_HEADS = frozenset({"llama", "mistral", "qwen2", "qwen3"})


class HFCausalLM(nn.Module):
    """Wraps an AutoModelForCausalLM: token ids in, summed token loss out, as in `TECausalLM.forward`.

    Packed samples are kept apart by transformers itself, from `position_ids` that restart.
    """

    def __init__(self, model: nn.Module, *, gradient_checkpointing: bool = False, reentrant: bool = False):
        super().__init__()
        self.model = model
        self.plain_head = model.config.model_type in PLAIN_HEADS
        if gradient_checkpointing:
            if not model.supports_gradient_checkpointing:
                raise ValueError(
                    f"--gradient_checkpointing: {type(model).__name__} does not support it; drop it"
                )
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder layers: the longest ModuleList, whatever the architecture calls it."""
        lists = [m for m in self.model.modules() if isinstance(m, nn.ModuleList)]
        return list(max(lists, key=len, default=[]))

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> TokenLoss:
        del cu_seqlens, max_seqlen
        inputs: dict[str, Any] = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        if not self.plain_head:
            logits = self.model(**inputs).logits
            return logits_cross_entropy(logits.flatten(0, 1), labels.flatten())
        hidden = self.model.get_decoder()(**inputs).last_hidden_state.flatten(0, 1)  # [T, D]
        return linear_cross_entropy(hidden, self.model.get_output_embeddings().weight, labels.flatten())


@torch.no_grad()
def refuse_leaking_packing(model: HFCausalLM) -> None:
    """ValueError if this model lets a packed sample see the one before it.

    Not every implementation reads sequence borders off `position_ids`, and those that do not train on other
    samples' tokens without an error. So two tokens of a first sample are exchanged, and the second one's
    loss must not notice.
    """
    device = next(model.parameters()).device
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]], device=device)
    labels = torch.tensor([[-100, -100, -100, -100, 1, 2, 3, -100]], device=device)
    rows = ([1, 2, 3, 4, 5, 6, 7, 8], [3, 1, 4, 2, 5, 6, 7, 8])
    one, other = (model(torch.tensor([ids], device=device), labels, positions).loss for ids in rows)
    if not torch.equal(one, other):
        raise ValueError(
            f"--packing: {type(model.model).__name__} lets packed samples see each other; add --no_packing"
        )


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside have parameters without storage, but real buffers, which no weight file brings."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate parameters that are on the meta device, uninitialised, and tie again what that unties."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    model.tie_weights()


def hf_state(model: HFCausalLM, gather: Gather) -> Iterator[tuple[str, Tensor]]:
    """The weights under their Hugging Face names, each tensor once (a tied head is left out)."""
    parameters = dict(model.model.named_parameters())
    tied = {name for name, _ in model.model.named_parameters(remove_duplicate=False)} - parameters.keys()
    for name, tensor in model.model.state_dict().items():
        if name not in tied:
            yield name, gather([parameters[name]])[0] if name in parameters else tensor
