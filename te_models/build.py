"""Building models: `find_model` resolves a name, `build_model` builds TE or Hugging Face layers."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from fp8_suite.core.errors import UserError, bad_setting, first_line, one_line
from fp8_suite.core.hub import require_reachable_hub
from fp8_suite.te_models.decoder import TECausalLM
from fp8_suite.te_models.families import FAMILIES, wrong_sizes
from fp8_suite.te_models.hugging_face import (
    HFCausalLM,
    hf_state,
    materialize,
    parameters_on_meta,
    refuse_leaking_packing,
    tied_names,
)
from fp8_suite.te_models.options import BuildOptions
from fp8_suite.te_models.presets import LOCAL_PRESETS, PRESETS, require_model
from fp8_suite.te_models.weights import (
    EMBEDDING,
    LM_HEAD,
    Gather,
    RandomSource,
    SafetensorsSource,
    WeightSource,
    fill_named,
    load_te,
    other_shape,
    te_to_hf,
    weight_files,
)
from torch import Tensor, nn

SAMPLES, SAMPLE_BYTES = 16, 2**16  # number and size of the samples that `digests` reads of a weight file


@dataclass(frozen=True)
class ModelSpec:
    """Model to build: its configuration, never changed, and its weights' folder (None: random weights)."""

    name: str
    config: Any
    weights: Path | None
    trust_remote_code: bool = False
    unused: tuple[str, ...] = ()  # tensors of the weight files that the model lacks

    @property
    def short_name(self) -> str:
        """Name without organisation or folder, for run folders and tags."""
        return self.name.rstrip("/").split("/")[-1]

    @property
    def family(self) -> str:
        return self.config.model_type

    @property
    def uses_remote_code(self) -> bool:
        """True if the model class is Python code from the model's repository."""
        auto_map = getattr(self.config, "auto_map", None) or {}
        return self.trust_remote_code and "AutoModelForCausalLM" in auto_map

    @property
    def is_known_family(self) -> bool:
        """True for a TE family with transformers' own class: known weight names, logits = lm_head(hidden)."""
        return self.family in FAMILIES and not self.uses_remote_code


def find_model(name: str, *, init: str, use_te: bool, trust_remote_code: bool = False) -> ModelSpec:
    """Resolve `--model_name` and `--init`, downloading configuration and weights where needed.

    Raise UserError if the model does not exist, cannot be downloaded, or cannot be trained.
    """
    require_model(name, init)
    random = init == "random" or name in LOCAL_PRESETS
    config = _read_config(name, random=random, trust_remote_code=trust_remote_code)
    spec = ModelSpec(name, config, None, trust_remote_code)
    _refuse_untrainable(spec)
    if use_te:
        refuse_te(name, config)
        if spec.uses_remote_code:
            raise bad_setting(
                "TE layers would replace the model's own Python code; drop --use_te or --trust_remote_code",
                use_te=True,
                model_name=name,
            )
    if not random:
        spec = replace(spec, weights=_find_weights(name))
        if use_te or weight_files(spec.weights):
            spec = _check_weights(spec, use_te=use_te)
    return spec


def with_special_tokens(spec: ModelSpec, tokenizer: Any) -> ModelSpec:
    """Return the spec with the tokenizer's special token ids, for a model with random weights."""
    # Models zero the padding token's embedding, which must not affect the end-of-text token.
    has_pad = tokenizer.pad_token_id != tokenizer.eos_token_id
    return _with_fields(
        spec,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id if has_pad else None,
    )


def _with_fields(spec: ModelSpec, **fields: Any) -> ModelSpec:
    """Return the spec with a changed copy of its configuration."""
    config = copy.deepcopy(spec.config)
    for name, value in fields.items():
        setattr(config, name, value)
    return replace(spec, config=config)


def _read_config(name: str, *, random: bool, trust_remote_code: bool) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    if random and name in PRESETS:
        fields = dict(PRESETS[name])
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    export = Path(name, "export")
    if Path(name, "metrics.jsonl").exists() and export.exists():
        raise bad_setting(f"this is a run folder; give its exported model, {export}", model_name=name)
    try:
        require_reachable_hub(name, ("config.json",))
        fields, _ = PretrainedConfig.get_config_dict(name)
        auto_map, model_type = fields.get("auto_map") or {}, fields.get("model_type")
        if trust_remote_code or "AutoConfig" not in auto_map or model_type in CONFIG_MAPPING:
            return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        if name in PRESETS:
            way = "or use --init random"
        else:
            way = f"or a preset: {', '.join(sorted(PRESETS if random else LOCAL_PRESETS))}"
        reason = f"{first_line(error)} Give a local folder, a hub id {way}"
        raise bad_setting(reason, model_name=name) from None
    except Exception as error:  # fields with wrong names or types raise errors of many types
        raise _wrong_config(name, error) from error
    reason = "it needs Python code from its repository; read that code, then add --trust_remote_code"
    raise bad_setting(reason, model_name=name)


def _wrong_config(name: str, error: Exception) -> UserError:
    return bad_setting(f"its config.json: {type(error).__name__}: {one_line(error)}", model_name=name)


def _refuse_untrainable(spec: ModelSpec) -> None:
    name, config = spec.name, spec.config
    if reason := wrong_sizes(config.get_text_config().to_dict()):
        raise bad_setting(f"its config.json: {reason}; correct it", model_name=name)
    if spec.is_known_family:
        try:
            _on_meta(spec)
        except Exception as error:
            raise _wrong_config(name, error) from error
    if getattr(config.get_text_config(), "is_causal", True) is False:
        raise bad_setting(
            "is_causal is false in its config.json, so tokens would see the next tokens that they predict; "
            "use a causal model, or remove that line",
            model_name=name,
        )
    if quantized := getattr(config, "quantization_config", None):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else "unknown"
        raise bad_setting(
            f"quantized weights cannot be trained (quant_method {method}); give the original, unquantized "
            "model",
            model_name=name,
        )


def refuse_te(name: str, config: Any) -> None:
    """Raise UserError if this model cannot be built from TE layers."""
    family, unknown = FAMILIES.get(config.model_type), f"model type {config.model_type!r} is not supported"
    reason = family.unsupported(config) if family else unknown
    if reason:
        way = f"Types with TE layers: {', '.join(FAMILIES)}; run this model without --use_te"
        raise bad_setting(f"{reason}. {way}", use_te=True, model_name=name)


def _find_weights(name: str) -> Path:
    """Return the local folder of a model's weights; download them from the hub if necessary."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            name,
            allow_patterns=["*.safetensors*", "*.json", "*.py"],
            ignore_patterns=["consolidated*", "original/*"],  # the same weights in other layouts
        )
    except OSError as error:  # the hub client's errors derive from it
        raise bad_setting(
            f"the weights cannot be fetched ({first_line(error)}); give a local folder, log in with "
            "`hf auth login` if the model is gated, or use --init random",
            model_name=name,
        ) from None
    return Path(folder)


def _check_weights(spec: ModelSpec, *, use_te: bool) -> ModelSpec:
    """Refuse unreadable safetensors and weights that do not fit TE layers, before anything is loaded.

    Return the spec with `unused` tensors, for a known family, and tied as in the files: a stored LM head
    that differs from the embedding is not tied, as in transformers.
    """
    source = SafetensorsSource(spec.weights)
    has_both = {EMBEDDING, LM_HEAD} <= source.shapes().keys()
    if has_both and getattr(spec.config, "tie_word_embeddings", False):
        tied = torch.equal(source.get(EMBEDDING), source.get(LM_HEAD))
        spec = _with_fields(spec, tie_word_embeddings=tied)
    if not spec.is_known_family:
        return spec
    model = _on_meta(spec)
    if use_te:
        source.require(_shapes(model), optional=tied_names(model))
    unused = source.shapes().keys() - model.state_dict().keys() - tied_names(model)
    return replace(spec, unused=tuple(sorted(unused)))


def digests(spec: ModelSpec) -> dict[str, str]:
    """Return digests of a model's configuration and weight files, to compare copies on several hosts.

    Only the size and SAMPLES parts of a weight file are hashed, so it is fast for any size. The first sample
    contains the names and shapes of the tensors, and two revisions of a model differ nearly everywhere.
    """
    settings = {k: v for k, v in spec.config.to_diff_dict().items() if not k.startswith("_")}
    text = json.dumps(settings, sort_keys=True, default=str)
    result = {"configuration": xxhash.xxh3_64_hexdigest(text.encode())}
    if spec.weights is not None:
        digest = xxhash.xxh3_64()
        for path in weight_files(spec.weights):
            size = path.stat().st_size
            digest.update(f"{path.name} {size} ".encode())
            with path.open("rb") as file:
                for i in range(SAMPLES):
                    file.seek(size * i // SAMPLES)
                    digest.update(file.read(SAMPLE_BYTES))
        result["weights"] = digest.hexdigest()
    return result


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
    model.materialize()
    load_te(model, weight_source(spec, seed=options.seed, device=options.device))
    return model


def build_hf(spec: ModelSpec, options: BuildOptions) -> HFCausalLM:
    """Build transformers' implementation; shard it on the meta device if its weights can be streamed."""
    source = _streamed_source(spec, options) if options.shard else None
    if source:
        with parameters_on_meta():
            inner = _from_config(spec, options.dtype)
        model = _wrap(inner, spec, options)
        materialize(inner, options.parameter_device or options.device)
        fill_named(dict(inner.named_parameters()), source)
    elif spec.weights:
        # A model that is loaded whole stays on the CPU until it is sharded.
        inner = _from_files(spec, options.dtype).to("cpu" if options.shard else options.device)
        model = _wrap(inner, spec, options)
    else:
        model = _wrap(_from_seed(spec, options), spec, options)
    dtype, flash_4 = options.compute_dtype or options.dtype, options.kernels.flash_attention
    model.choose_attention(options.device, dtype, flash_4=flash_4)
    if options.packed:
        sharded = options.shard is not None and dist.is_initialized()
        refuse_leaking_packing(model.eval(), spec.name, sharded=sharded)
    if options.fp8_lm_head:  # after the packing check, which runs in high precision
        model.use_fp8_lm_head()
    if options.compile_layers:
        model.compile_blocks()
    return model


def _wrap(inner: nn.Module, spec: ModelSpec, options: BuildOptions) -> HFCausalLM:
    """Wrap a transformers model, convert its linear layers and shard it."""
    # The padding token may be the end-of-turn token, whose embedding must train. Labels mask padding.
    for module in inner.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
    model = HFCausalLM(
        inner,
        known_family=spec.is_known_family,
        recompute=options.recompute,
        reentrant=options.reentrant,
    )
    if options.convert:
        options.convert(model)
    if options.shard:
        options.shard(model)
    return model


def _from_config(spec: ModelSpec, dtype: torch.dtype | None = None) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(
        spec.config, dtype=dtype, trust_remote_code=spec.trust_remote_code
    )


def _from_seed(spec: ModelSpec, options: BuildOptions) -> nn.Module:
    torch.manual_seed(options.seed)
    with torch.device(options.device):
        model = _from_config(spec, options.dtype)
    if spec.is_known_family:  # start from the same random weights as the TE layers
        source = weight_source(spec, seed=options.seed, device=options.device)
        fill_named(dict(model.named_parameters()), source)
    return model


def _from_files(spec: ModelSpec, dtype: torch.dtype) -> nn.Module:
    """Load a model with transformers; raise UserError if files are unreadable or weights are missing."""
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            spec.weights,
            dtype=dtype,
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
    if missing := set(info["missing_keys"]):
        raise bad_setting(
            f"the weights lack {', '.join(sorted(missing))}; give a complete model (transformers would "
            "initialize them at random)",
            model_name=spec.name,
        )
    return model


def weight_source(spec: ModelSpec, *, seed: int, device: torch.device) -> WeightSource:
    """Return the spec's safetensors, or seeded random weights."""
    if spec.weights is not None:
        return SafetensorsSource(spec.weights)
    return RandomSource(_shapes(_on_meta(spec)), seed=seed, std=spec.config.initializer_range, device=device)


def _streamed_source(spec: ModelSpec, options: BuildOptions) -> WeightSource | None:
    """Return a source whose tensors map 1:1 to parameters, so that each rank can stream its shards.

    Return None if only transformers can load the model: it renames, merges or scales tensors on loading, or
    the files contain buffers.
    """
    if not (weight_files(spec.weights) if spec.weights else spec.is_known_family):
        return None
    source, model = weight_source(spec, seed=options.seed, device=options.device), _on_meta(spec)
    tied, parameters = tied_names(model), _shapes(model)
    stored = {name: shape for name, shape in source.shapes().items() if name not in tied}
    return source if stored == parameters and set(model.state_dict()) - tied == parameters.keys() else None


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in model.named_parameters()}


def _on_meta(spec: ModelSpec) -> nn.Module:
    with torch.device("meta"):
        return _from_config(spec)


def count_parameters(spec: ModelSpec) -> int:
    """Count the parameters of the Hugging Face model, tied weights once."""
    return sum(p.numel() for p in _on_meta(spec).parameters())


def no_gather(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors as they are: the `gather` of an unsharded model."""
    return [tensor.detach() for tensor in tensors]


def export_tensors(model: nn.Module, gather: Gather = no_gather) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's weights under Hugging Face names, one by one; collective if `gather` is."""
    return hf_state(model, gather) if isinstance(model, HFCausalLM) else te_to_hf(model, gather)
