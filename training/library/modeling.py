"""Models of TE layers with the interface of transformers: inputs, outputs, saving, recomputation.

The recipe is entered inside forward. B rows, S tokens per row, D hidden size, V vocabulary.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fp8_suite.core.errors import UserError
from fp8_suite.data.collate import IGNORE
from fp8_suite.te_models.decoder import TECausalLM
from fp8_suite.te_models.sources import TensorSource
from fp8_suite.te_models.spec import ModelSpec, on_meta, parameter_shapes, refuse_length, tied_names
from fp8_suite.te_models.weights import load_te, te_to_hf
from fp8_suite.training.library.inputs import decoder_inputs
from fp8_suite.training.precision import scaling
from fp8_suite.training.precision.coverage import Coverage, coverage
from fp8_suite.training.precision.recipes import Precision, build_autocast
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast


class TEModel(nn.Module):
    """Decoder without its LM head: hidden states of token ids. TRL calls it alone."""

    def __init__(self, decoder: TECausalLM, precision: Precision):
        super().__init__()
        self.decoder, self.precision = decoder, precision
        weights = {"device": decoder.options.device, "parameter_dtype": decoder.options.dtype}
        self.autocast = build_autocast(precision, **weights)
        self.gradient_checkpointing = False  # set by `gradient_checkpointing_enable`
        self.calibrated = not precision.needs_calibration

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        targets: Tensor | None = None,
        num_items_in_batch: Any = None,
        **arguments: Any,
    ) -> BaseModelOutputWithPast:
        """Return hidden states [B, S, D] in the weights' dtype; inputs: `decoder_inputs`.

        `targets` [B, S], labels of each token, and `num_items_in_batch` are for calibration.
        """
        decoder, width = self.decoder, input_ids.shape[1]
        multiple = self.precision.token_multiple
        inputs = decoder_inputs(input_ids, attention_mask, position_ids, multiple=multiple, **arguments)
        refuse_length(decoder.config.model_type, decoder.config, width)
        if (longest := inputs["max_seqlen"]) > len(decoder.rope) or decoder.rope.dtype != torch.float32:
            decoder.set_max_positions(2 ** (longest - 1).bit_length())
        decoder.recompute = ["layer" if self.gradient_checkpointing else "none"] * len(decoder.layers)
        if not self.calibrated:
            self._calibrate(inputs, targets, num_items_in_batch)
        state = nullcontext() if torch.is_grad_enabled() else scaling.frozen_scaling(decoder)
        with state, self.autocast():
            hidden = decoder.hidden_states(**inputs)
        hidden = hidden.unflatten(0, (len(input_ids), -1))[:, :width]
        return BaseModelOutputWithPast(last_hidden_state=hidden.to(decoder.norm.weight.dtype))

    def _calibrate(self, inputs: dict[str, Any], targets: Tensor | None, num_items: Any) -> None:
        """Compute the first scales of delayed scaling from a batch, as a run does. Collective.

        Without `targets` [B, S], the next tokens are the labels.
        """
        trained = [p for p in self.decoder.parameters() if p.requires_grad]
        if any(isinstance(p, DTensor) for p in self.decoder.layers.parameters()):
            recipe = self.precision.effective
            raise UserError(f"recipe {recipe}: calibration needs whole weights; with FSDP use another")
        self.calibrated = True
        ids = inputs["input_ids"]
        targets = ids[:, 1:] if targets is None else targets
        targets = F.pad(targets, (0, ids.shape[1] - targets.shape[1]), value=IGNORE)
        first = scaling.first_tokens(inputs | {"labels": targets})
        for _ in range(scaling.CALIBRATION_PASSES):
            with torch.enable_grad(), self.autocast():
                loss = self.decoder(**first).loss
            if trained:
                torch.autograd.grad(loss, trained, allow_unused=True)
        ranks = dist.get_world_size() if dist.is_initialized() else 1  # `num_items` is the sum over all
        tokens = (targets != IGNORE).sum() if num_items is None else num_items / ranks
        scaling.scale_gradients(scaling.scaling_state(self.decoder), 1 / max(1.0, float(tokens)))


class TEForCausalLM(PreTrainedModel, GenerationMixin):
    """Causal language model of TE layers, made by `from_pretrained` or `convert`."""

    accepts_loss_kwargs = True  # Trainer passes `num_items_in_batch`
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True  # of the configuration; TE chooses its kernel itself
    _no_split_modules = ("TransformerLayer",)
    _tied_weights_keys = {"model.decoder.lm_head.weight": "model.decoder.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, decoder: TECausalLM, precision: Precision):
        super().__init__(decoder.config)
        self.model = TEModel(decoder, precision)
        self.register_state_dict_post_hook(_drop_extra_state)
        self.register_load_state_dict_post_hook(_ignore_extra_state)
        self.post_init()

    def init_weights(self) -> None:
        """Keep the weights, which the builder has filled."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        num_items_in_batch: Any = None,
        **arguments: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits [B, S, V], and with labels the loss, as transformers' models.

        Training with labels skips the logits, which the fused loss does not need.
        """
        loss = logits = targets = None
        if labels is not None:
            targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
        arguments |= {"targets": targets, "num_items_in_batch": num_items_in_batch}
        hidden = self.model(input_ids, attention_mask, position_ids, **arguments).last_hidden_state
        decoder = self.model.decoder
        with self.model.autocast():
            if targets is not None:
                items = num_items_in_batch
                items = (targets != IGNORE).sum().clamp(min=1) if items is None else items
                loss = decoder.token_loss(hidden.flatten(0, 1), targets).loss / items
            if targets is None or not self.training:
                logits = decoder.lm_head(hidden)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def coverage(self) -> Coverage:
        """Return which GEMMs ran in FP8 in the last forward pass, read off the modules."""
        return coverage(self.model.decoder, "fp32" if self.model.precision.effective == "fp32" else "bf16")

    def get_input_embeddings(self) -> nn.Module:
        return self.model.decoder.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.model.decoder.lm_head

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        raise NotImplementedError("resize transformers' model, then convert it to TE layers")

    def save_pretrained(self, save_directory: Any, *, state_dict: dict | None = None, **options: Any) -> None:
        """Save the weights as transformers' model of this configuration.

        `state_dict` is this model's, gathered, if the model is sharded.
        """
        saved = self._hugging_face()
        saved.generation_config = self.generation_config
        names = {id(p): name for name, p in self.named_parameters()}

        def gather(parameters: list[Tensor]) -> list[Tensor]:
            if state_dict is not None:
                return [state_dict[names[id(p)]] for p in parameters]
            return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in parameters]

        tensors = dict(te_to_hf(self.model.decoder, gather))
        saved.save_pretrained(save_directory, state_dict=tensors, **options)

    def _hugging_face(self) -> PreTrainedModel:
        """Return transformers' model of this configuration, on the meta device."""
        return on_meta(ModelSpec("", self.config, None), self.dtype)

    def load_state_dict(self, state_dict: dict[str, Tensor], strict: bool = True, **options: Any) -> Any:
        """Load this model's tensors, or those of transformers' model, as `save_pretrained` wrote them."""
        if all(name.startswith("model.decoder.") for name in state_dict):
            return super().load_state_dict(state_dict, strict=strict, **options)
        source, expected = TensorSource(state_dict), self._hugging_face()
        source.require(parameter_shapes(expected), optional=tied_names(expected))
        load_te(self.model.decoder, source)
        return _IncompatibleKeys([], [])


def _drop_extra_state(module: nn.Module, state_dict: dict, prefix: str, metadata: Any) -> None:
    """Drop what TE pickles: scales of delayed scaling, which a resumed loop calibrates again."""
    for name in [name for name in state_dict if name.endswith("_extra_state")]:
        del state_dict[name]


def _ignore_extra_state(module: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [name for name in keys.missing_keys if not name.endswith("_extra_state")]
