"""Models of TE layers with the interface of transformers: inputs, outputs, saving, recomputation.

The recipe is entered inside forward. B rows, S tokens per row, T = B*S tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fp8_suite.core.errors import UserError
from fp8_suite.core.recipes import RECIPES
from fp8_suite.data.collate import IGNORE
from fp8_suite.te_models.backend import te_module
from fp8_suite.te_models.decoder import TECausalLM
from fp8_suite.te_models.library.inputs import decoder_inputs, require_known
from fp8_suite.te_models.precision.coverage import Coverage, coverage
from fp8_suite.te_models.precision.scaling_state import (
    CALIBRATION_PASSES,
    first_tokens,
    frozen_scaling,
    restore_scaling,
    scale_gradients,
    scaling_state,
)
from fp8_suite.te_models.settings import recompute_levels
from fp8_suite.te_models.spec import ModelSpec, from_config, parameter_shapes, tied_names
from fp8_suite.te_models.weights import TensorSource, load_te, te_to_hf
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

SCALING_FILE = "fp8_scaling.safetensors"  # scales and amax histories, beside the weights


class TEPreTrainedModel(PreTrainedModel):
    """Base of the models below; the builder has filled the weights."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True  # of the configuration; TE chooses its kernel itself
    _no_split_modules = ("TransformerLayer",)

    def init_weights(self) -> None:
        """Keep the weights."""


class TEModel(TEPreTrainedModel):
    """Decoder without its LM head: hidden states of token ids."""

    def __init__(self, decoder: TECausalLM, recipe: str, te_recipe: Any):
        super().__init__(decoder.config)
        self.decoder, self.recipe, self.te_recipe = decoder, recipe, te_recipe
        self.levels = decoder.recompute
        self.gradient_checkpointing = False  # set by `gradient_checkpointing_enable`
        self.saved_scaling: dict[str, Tensor] = {}  # restored after calibration
        self.calibrated = not (recipe in RECIPES and RECIPES[recipe].stateful)
        self.post_init()

    def autocast(self) -> AbstractContextManager:
        """Return the context of forward passes: the recipe, and BF16 for weights in FP32."""
        contexts = ExitStack()
        if self.recipe != "fp32" and self.dtype == torch.float32:
            contexts.enter_context(torch.autocast(self.device.type, dtype=torch.bfloat16))
        if self.te_recipe is not None:
            te = te_module(self.decoder.options.te_backend)
            contexts.enter_context(te.autocast(enabled=True, recipe=self.te_recipe))
        return contexts

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        cu_seq_lens_q: Tensor | None = None,
        targets: Tensor | None = None,
        num_items_in_batch: Any = None,
        **arguments: Any,
    ) -> BaseModelOutputWithPast:
        """Return hidden states [B, S, D] in the weights' dtype; inputs: `decoder_inputs`.

        `targets` [B, S], labels of each token, and `num_items_in_batch` are for calibration.
        """
        require_known(arguments)
        width, decoder = input_ids.shape[1], self.decoder
        multiple = RECIPES[self.recipe].token_multiple if self.te_recipe is not None else 1
        inputs = decoder_inputs(input_ids, attention_mask, position_ids, cu_seq_lens_q, multiple=multiple)
        longest = inputs["max_seqlen"]
        window = decoder.family.window(self.config)
        if window is not None and width > window:
            reason = f"TE layers have no sliding window, and the model has one of {window} tokens"
            raise UserError(f"rows of {width} tokens: {reason}; use at most that length")
        if longest > len(decoder.rope) or decoder.rope.dtype != torch.float32:
            decoder.set_max_positions(2 ** (longest - 1).bit_length())
        recomputed = self.gradient_checkpointing and set(self.levels) == {"none"}
        decoder.recompute = recompute_levels("layer", len(self.levels)) if recomputed else self.levels
        if not self.calibrated:
            self._calibrate(inputs, targets, num_items_in_batch)
        state = nullcontext() if torch.is_grad_enabled() else frozen_scaling(decoder)
        with state, self.autocast():
            hidden = decoder.hidden_states(**inputs)
        hidden = hidden.unflatten(0, (len(input_ids), -1))[:, :width]
        return BaseModelOutputWithPast(last_hidden_state=hidden.to(self.dtype))

    def _calibrate(self, inputs: dict[str, Any], targets: Tensor | None, num_items: Any) -> None:
        """Compute the first scales of delayed scaling from a batch, as a run does; then restore saved ones.

        Collective. Without `targets` [B, S], the next tokens are the labels.
        """
        if any(isinstance(p, DTensor) for p in self.decoder.layers.parameters()):
            raise UserError(f"recipe {self.recipe}: calibration needs whole weights; with FSDP use another")
        self.calibrated = True
        ids = inputs["input_ids"]
        targets = F.pad(ids[:, 1:], (0, 1), value=IGNORE) if targets is None else targets
        targets = F.pad(targets, (0, ids.shape[1] - targets.shape[1]), value=IGNORE)
        embedding = self.decoder.embed_tokens.weight
        trained = [p for p in self.decoder.parameters() if p.requires_grad]
        ends = [embedding] if embedding.requires_grad else trained  # where the gradients may stop
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []), torch.enable_grad():
            for _ in range(CALIBRATION_PASSES):
                with self.autocast():
                    loss, _ = self.decoder(**first_tokens(inputs | {"labels": targets}))
                if ends:
                    torch.autograd.grad(loss, ends, allow_unused=True)
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if num_items is None:
            tokens = (targets != IGNORE).sum().float()
            if ranks > 1:
                dist.all_reduce(tokens)
            num_items = tokens
        scale_gradients(self.decoder, ranks / max(1.0, float(num_items)))
        restore_scaling(self.decoder, self.saved_scaling)


class TEForCausalLM(TEPreTrainedModel, GenerationMixin):
    """Causal language model of TE layers, made by `from_pretrained` or `convert`."""

    accepts_loss_kwargs = True  # Trainer passes `num_items_in_batch`

    def __init__(self, decoder: TECausalLM, recipe: str, te_recipe: Any):
        super().__init__(decoder.config)
        self.model = TEModel(decoder, recipe, te_recipe)
        if decoder.tied:
            self._tied_weights_keys = {"model.decoder.lm_head.weight": "model.decoder.embed_tokens.weight"}
        self.register_state_dict_post_hook(_drop_extra_state)
        self.register_load_state_dict_post_hook(_ignore_extra_state)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        num_items_in_batch: Any = None,
        skip_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **arguments: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits [B, S, V], and with labels the loss, as transformers' models.

        Training with labels skips the logits, which the fused loss does not need, unless `skip_logits=False`.
        """
        # No parameter: Trainer takes every parameter with "label" in its name for required labels.
        targets = arguments.pop("shift_labels", None)
        if targets is None and labels is not None:
            targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
        known = {"targets": targets, "num_items_in_batch": num_items_in_batch}
        hidden = self.model(input_ids, attention_mask, position_ids, **known, **arguments).last_hidden_state
        loss = logits = None
        decoder = self.model.decoder
        with self.model.autocast():
            if targets is not None:
                items = num_items_in_batch
                items = (targets != IGNORE).sum().clamp(min=1) if items is None else items
                loss = decoder.token_loss(hidden.flatten(0, 1), targets).loss
                loss = loss / (items.to(loss.device) if isinstance(items, Tensor) else items)
            if not (self.training and targets is not None if skip_logits is None else skip_logits):
                kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
                logits = decoder.lm_head(hidden[:, kept])
        output = CausalLMOutputWithPast(loss=loss, logits=logits)
        return output.to_tuple() if arguments.get("return_dict") is False else output

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> dict[str, Any]:
        """Return all tokens, because there is no cache."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def coverage(self) -> Coverage:
        """Return which GEMMs ran in FP8 in the last forward pass, read off the modules."""
        return coverage(self.model.decoder, "fp32" if self.model.recipe == "fp32" else "bf16")

    def get_input_embeddings(self) -> nn.Module:
        return self.model.decoder.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.model.decoder.lm_head

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        self.model.decoder.tie()

    def save_pretrained(self, save_directory: Any, *, state_dict: dict | None = None, **options: Any) -> None:
        """Save the weights as transformers' model of this configuration, and the FP8 scaling state.

        `state_dict` is this model's, gathered, if the model is sharded.
        """
        saved = self._hugging_face()
        saved.generation_config, saved.model_tags = self.generation_config, self.model_tags
        names = {id(p): name for name, p in self.named_parameters()}

        def gather(parameters: list[Tensor]) -> list[Tensor]:
            if state_dict is not None:
                return [state_dict[names[id(p)]] for p in parameters]
            return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in parameters]

        tensors = dict(te_to_hf(self.model.decoder, gather))
        saved.save_pretrained(save_directory, state_dict=tensors, **options)
        state = scaling_state(self.model.decoder) or self.model.saved_scaling
        if state and options.get("is_main_process", True):
            save_file({name: t.contiguous() for name, t in state.items()}, Path(save_directory, SCALING_FILE))

    def _hugging_face(self) -> PreTrainedModel:
        """Return transformers' model of this configuration, on the meta device."""
        with torch.device("meta"):
            return from_config(ModelSpec("", self.config, None), self.dtype)

    def load_state_dict(self, state_dict: dict[str, Tensor], strict: bool = True, **options: Any) -> Any:
        """Load this model's tensors, or those that `save_pretrained` wrote, in one file."""
        if all(name.startswith("model.decoder.") for name in state_dict):
            return super().load_state_dict(state_dict, strict=strict, **options)
        source, expected = TensorSource(state_dict), self._hugging_face()
        source.require(parameter_shapes(expected), optional=tied_names(expected))
        load_te(self.model.decoder, source)
        return _IncompatibleKeys([], [])


def _drop_extra_state(module: nn.Module, state_dict: dict, prefix: str, metadata: Any) -> None:
    """Drop what TE pickles; `SCALING_FILE` has the scaling state as tensors."""
    for name in [name for name in state_dict if name.endswith("_extra_state")]:
        del state_dict[name]


def _ignore_extra_state(module: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [name for name in keys.missing_keys if not name.endswith("_extra_state")]
