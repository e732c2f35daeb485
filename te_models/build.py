"""Building models of TE or Hugging Face layers from a `ModelSpec`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fp8_suite.core.errors import bad_setting, first_line
from fp8_suite.te_models.decoder import TECausalLM
from fp8_suite.te_models.dependence import refuse_dependent_samples
from fp8_suite.te_models.fp8_weights import frozen_in_fp8
from fp8_suite.te_models.hugging_face import HFCausalLM, hf_state, materialize, parameters_on_meta
from fp8_suite.te_models.lora.adapters import adapt_hf, initial_values, is_adapter
from fp8_suite.te_models.options import BuildOptions
from fp8_suite.te_models.sources import TensorSource, WeightSource, missing_weights, other_shape, weight_files
from fp8_suite.te_models.spec import (
    ModelSpec,
    auto_class,
    from_config,
    on_meta,
    parameter_shapes,
    tied_names,
    weight_source,
)
from fp8_suite.te_models.weights import Gather, fill_named, load_te, te_to_hf
from torch import Tensor, nn


def build_model(spec: ModelSpec, options: BuildOptions) -> nn.Module:
    """Build a model of TE or Hugging Face layers, in training mode, with the same weights. Collective."""
    build = build_hf if options.te_backend is None else build_te
    return build(spec, options).train()


def build_te(spec: ModelSpec, options: BuildOptions) -> TECausalLM:
    """Build a decoder of TE layers: shard it on the meta device, then fill each rank's shards."""
    if options.te_backend == "emulated" and options.native.weight_recipe:
        raise bad_setting("--te_backend emulated has no FP8 weights; drop one of them", fp8_all_gather=True)
    model = TECausalLM(spec.config, options)
    if options.shard:
        options.shard(model)
        model.cache_fp8_weights_under_fsdp()
    frozen = options.native.frozen_recipe
    model.materialize(layers=frozen is None)
    if options.load_weights:
        source = weight_source(spec, seed=options.seed, device=options.device)
        loading = partial(frozen_in_fp8, recipe=frozen, device=options.device) if frozen else nullcontext
        load_te(model, source, options.split_master, loading)
        _initialize_adapters(model, options)
        return model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def build_hf(spec: ModelSpec, options: BuildOptions) -> HFCausalLM:
    """Build transformers' implementation; shard it on the meta device if its weights can be streamed."""
    source = inner = None
    if options.shard or spec.quantization:
        with parameters_on_meta():
            inner = from_config(spec, options.dtype)
        source = _streamed_source(spec, options, inner)
    if source:
        model = _wrap(inner, spec, options)
        materialize(inner, options.device)
        base = {name: p for name, p in inner.named_parameters() if not is_adapter(name)}
        fill_named(base, source, options.split_master)
    elif spec.weights:
        # A model that is loaded whole stays on the CPU until it is sharded.
        inner = _from_files(spec, options).to("cpu" if options.shard else options.device)
        model = _wrap(inner, spec, options)
    else:
        model = _wrap(_from_seed(spec, options), spec, options)
    _initialize_adapters(model, options)
    dtype, flash_4 = options.compute_dtype or options.dtype, options.kernels.flash_attention
    model.choose_attention(options.device, dtype, flash_4=flash_4)
    refuse_dependent_samples(
        model.eval(),
        spec.name,
        packed=options.packed,
        max_length=options.max_positions,
        sharded=options.shard is not None and dist.is_initialized(),
    )
    if options.fp8_lm_head:  # after the packing check, which runs in high precision
        model.use_fp8_lm_head()
    if options.compile_layers:
        model.compile_blocks()
    return model


def _initialize_adapters(model: nn.Module, options: BuildOptions) -> None:
    for adapter, values in initial_values(model, options.seed):
        fill_named({name: getattr(adapter, name) for name in values}, TensorSource(values))


def _wrap(inner: nn.Module, spec: ModelSpec, options: BuildOptions) -> HFCausalLM:
    """Wrap a transformers model, convert its linear layers and shard it."""
    # The padding token may be the end-of-turn token, whose embedding must train. Labels mask padding.
    for module in inner.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
    model = HFCausalLM(
        inner, known_family=spec.is_known_family, recompute=options.recompute, reentrant=options.reentrant
    )
    if options.convert:
        options.convert(model)
    if options.lora.enabled:
        adapt_hf(model, options.lora)
    if options.shard:
        options.shard(model)
    return model


def _from_seed(spec: ModelSpec, options: BuildOptions) -> nn.Module:
    torch.manual_seed(options.seed)
    with torch.device(options.device):
        model = from_config(spec, options.dtype)
    if spec.is_known_family:  # start from the same random weights as the TE layers
        source = weight_source(spec, seed=options.seed, device=options.device)
        fill_named(dict(model.named_parameters()), source)
    return model


def _from_files(spec: ModelSpec, options: BuildOptions) -> nn.Module:
    """Load a model with transformers; raise UserError if files are unreadable or weights are missing."""
    kind = auto_class(spec.config, trust_remote_code=spec.trust_remote_code)
    weights: dict[str, Any] = {"pretrained_model_name_or_path": spec.weights}
    if spec.quantization:
        kind, source = type(on_meta(spec)), weight_source(spec, seed=options.seed, device=options.device)
        tensors = {name: source.get(name).to("cpu", options.dtype) for name in source.shapes()}
        weights = {"pretrained_model_name_or_path": None, "config": spec.config, "state_dict": tensors}
    try:
        model, info = kind.from_pretrained(
            **weights,
            dtype=options.dtype,
            trust_remote_code=spec.trust_remote_code,
            output_loading_info=True,  # mismatches are reported below in one line
            ignore_mismatched_sizes=True,
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # damaged files raise exceptions of any type
        reason = f"transformers cannot load the weights ({type(error).__name__}: {first_line(error)})"
        way = "download them again, or give another model"
        raise bad_setting(f"{reason}; {way}", model_name=spec.weights) from error
    for key, stored, expected in info["mismatched_keys"]:
        raise other_shape(spec.name, key, stored, expected)
    if missing := info["missing_keys"]:
        raise missing_weights(spec.name, missing)
    return model


def _streamed_source(spec: ModelSpec, options: BuildOptions, model: nn.Module) -> WeightSource | None:
    """Return a source whose tensors map 1:1 to the model's parameters, so each rank can stream its shards.

    Return None if only transformers can load the model: it renames, merges or scales tensors on loading, or
    the files contain buffers.
    """
    if not (weight_files(spec.weights) if spec.weights else spec.is_known_family):
        return None
    source = weight_source(spec, seed=options.seed, device=options.device)
    tied, parameters = tied_names(model), parameter_shapes(model)
    stored = {name: shape for name, shape in source.shapes().items() if name not in tied}
    return source if stored == parameters and set(model.state_dict()) - tied == parameters.keys() else None


def export_tensors(model: nn.Module, gather: Gather = list) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's weights under Hugging Face names, one by one; collective if `gather` is.

    Without `gather`, the model must not be sharded.
    """
    return hf_state(model, gather) if isinstance(model, HFCausalLM) else te_to_hf(model, gather)
