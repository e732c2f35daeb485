"""Building models: `plan_model` resolves a name, `build_model` builds TE or Hugging Face layers."""

from __future__ import annotations

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
class ModelPlan:
    """Model to build: its configuration and the folder of its weights (None: random weights)."""

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


def plan_model(
    name: str, *, init: str, use_te: bool, cache_dir: str | None = None, trust_remote_code: bool = False
) -> ModelPlan:
    """Resolve `--model_name` and `--init`, downloading configuration and weights where needed.

    Raise UserError if the model does not exist, cannot be downloaded, or cannot be trained.
    """
    require_model(name, init)
    random = init == "random" or name in LOCAL_PRESETS
    config = _read_config(name, random=random, cache_dir=cache_dir, trust_remote_code=trust_remote_code)
    plan = ModelPlan(name, config, None, trust_remote_code)
    _refuse_untrainable(plan)
    if use_te:
        refuse_te(name, config)
        if plan.uses_remote_code:
            raise bad_setting(
                "TE layers would replace the model's own Python code; drop --use_te or --trust_remote_code",
                use_te=True,
                model_name=name,
            )
    if not random:
        plan = replace(plan, weights=_find_weights(name, cache_dir))
        if use_te or weight_files(plan.weights):
            plan = replace(plan, unused=tuple(_check_weights(plan, use_te=use_te)))
    return plan


def _read_config(name: str, *, random: bool, cache_dir: str | None, trust_remote_code: bool) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    if random and name in PRESETS:
        fields = dict(PRESETS[name])
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    export = Path(name, "export")
    if Path(name, "metrics.jsonl").exists() and export.exists():
        raise bad_setting(f"this is a run folder; give its exported model, {export}", model_name=name)
    try:
        require_reachable_hub(name, ("config.json",), cache_dir)
        fields, _ = PretrainedConfig.get_config_dict(name, cache_dir=cache_dir)
        auto_map, model_type = fields.get("auto_map") or {}, fields.get("model_type")
        if trust_remote_code or "AutoConfig" not in auto_map or model_type in CONFIG_MAPPING:
            return AutoConfig.from_pretrained(name, cache_dir=cache_dir, trust_remote_code=trust_remote_code)
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


def _refuse_untrainable(plan: ModelPlan) -> None:
    name, config = plan.name, plan.config
    if plan.is_known_family:
        if reason := wrong_sizes(config):
            raise bad_setting(f"its config.json: {reason}", model_name=name)
        try:
            _on_meta(plan)
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


def _find_weights(name: str, cache_dir: str | None) -> Path:
    """Return the local folder of a model's weights; download them from the hub if necessary."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            name,
            cache_dir=cache_dir,
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


def _check_weights(plan: ModelPlan, *, use_te: bool) -> list[str]:
    """Refuse unreadable safetensors and weights that do not fit TE layers, before anything is loaded.

    Return the tensors that a model of a known family lacks, which transformers leaves out.
    If the files hold both an embedding and an LM head, set the configuration's `tie_word_embeddings` to
    whether they are equal.
    """
    source, config = SafetensorsSource(plan.weights), plan.config
    has_both = {EMBEDDING, LM_HEAD} <= source.shapes().keys()
    if has_both and getattr(config, "tie_word_embeddings", False):
        # As in transformers: a stored head that differs from the embedding is not tied.
        config.tie_word_embeddings = torch.equal(source.get(EMBEDDING), source.get(LM_HEAD))
    if not plan.is_known_family:
        return []
    model = _on_meta(plan)
    if use_te:
        source.require(_shapes(model), optional=tied_names(model))
    return sorted(source.shapes().keys() - model.state_dict().keys() - tied_names(model))


def digests(plan: ModelPlan) -> dict[str, str]:
    """Return digests of a model's configuration and weight files, to compare copies on several hosts.

    Only the size and SAMPLES parts of a weight file are hashed, so it is fast for any size. The first sample
    contains the names and shapes of the tensors, and two revisions of a model differ nearly everywhere.
    """
    settings = {k: v for k, v in plan.config.to_diff_dict().items() if not k.startswith("_")}
    text = json.dumps(settings, sort_keys=True, default=str)
    result = {"configuration": xxhash.xxh3_64_hexdigest(text.encode())}
    if plan.weights is not None:
        digest = xxhash.xxh3_64()
        for path in weight_files(plan.weights):
            size = path.stat().st_size
            digest.update(f"{path.name} {size} ".encode())
            with path.open("rb") as file:
                for i in range(SAMPLES):
                    file.seek(size * i // SAMPLES)
                    digest.update(file.read(SAMPLE_BYTES))
        result["weights"] = digest.hexdigest()
    return result


def build_model(plan: ModelPlan, options: BuildOptions) -> nn.Module:
    """Build a model of TE or Hugging Face layers, in training mode, with the same weights. Collective."""
    build = build_hf if options.te_backend is None else build_te
    return build(plan, options).train()


def build_te(plan: ModelPlan, options: BuildOptions) -> TECausalLM:
    """Build a decoder of TE layers: shard it on the meta device, then fill each rank's shards."""
    if options.te_backend == "emulated" and options.native.weight_recipe:
        raise bad_setting("--te_backend emulated has no FP8 weights; drop one of them", fp8_all_gather=True)
    model = TECausalLM(plan.config, options)
    if options.shard:
        options.shard(model)
        model.cache_fp8_weights_under_fsdp()
    model.materialize()
    load_te(model, weight_source(plan, seed=options.seed, device=options.device))
    return model


def build_hf(plan: ModelPlan, options: BuildOptions) -> HFCausalLM:
    """Build transformers' implementation; shard it on the meta device if its weights can be streamed."""
    source = _streamed_source(plan, options) if options.shard else None
    if source:
        with parameters_on_meta():
            inner = _from_config(plan, options.dtype)
        model = _wrap(inner, plan, options)
        materialize(inner, options.parameter_device or options.device)
        fill_named(dict(inner.named_parameters()), source)
    elif plan.weights:
        # A model that is loaded whole stays on the CPU until it is sharded.
        inner = _from_files(plan, options.dtype).to("cpu" if options.shard else options.device)
        model = _wrap(inner, plan, options)
    else:
        model = _wrap(_from_seed(plan, options), plan, options)
    model.choose_attention(options.device, options.compute_dtype or options.dtype)
    if options.packed:
        sharded = options.shard is not None and dist.is_initialized()
        refuse_leaking_packing(model.eval(), plan.name, sharded=sharded)
    if options.fp8_lm_head:  # after the packing check, which runs in high precision
        model.use_fp8_lm_head()
    if options.compile_layers:
        model.compile_blocks()
    return model


def _wrap(inner: nn.Module, plan: ModelPlan, options: BuildOptions) -> HFCausalLM:
    """Wrap a transformers model, convert its linear layers and shard it."""
    # The padding token may be the end-of-turn token, whose embedding must train. Labels mask padding.
    for module in inner.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
    model = HFCausalLM(
        inner,
        known_family=plan.is_known_family,
        recompute=options.recompute,
        reentrant=options.reentrant,
    )
    if options.convert:
        options.convert(model)
    if options.shard:
        options.shard(model)
    return model


def _from_config(plan: ModelPlan, dtype: torch.dtype | None = None) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(
        plan.config, dtype=dtype, trust_remote_code=plan.trust_remote_code
    )


def _from_seed(plan: ModelPlan, options: BuildOptions) -> nn.Module:
    torch.manual_seed(options.seed)
    with torch.device(options.device):
        model = _from_config(plan, options.dtype)
    if plan.is_known_family:  # start from the same random weights as the TE layers
        source = weight_source(plan, seed=options.seed, device=options.device)
        fill_named(dict(model.named_parameters()), source)
    return model


def _from_files(plan: ModelPlan, dtype: torch.dtype) -> nn.Module:
    """Load a model with transformers; raise UserError if files are unreadable or weights are missing."""
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            plan.weights,
            dtype=dtype,
            trust_remote_code=plan.trust_remote_code,
            output_loading_info=True,  # mismatches are reported below in one line
            ignore_mismatched_sizes=True,
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # damaged files raise exceptions of any type
        reason = f"transformers cannot load the weights ({type(error).__name__}: {first_line(error)})"
        way = "download them again, or give another model"
        raise bad_setting(f"{reason}; {way}", model_name=plan.weights) from error
    for key, stored, expected in info["mismatched_keys"]:
        raise other_shape(plan.name, key, stored, expected)
    if missing := set(info["missing_keys"]):
        raise bad_setting(
            f"the weights lack {', '.join(sorted(missing))}; give a complete model (transformers would "
            "initialize them at random)",
            model_name=plan.name,
        )
    return model


def weight_source(plan: ModelPlan, *, seed: int, device: torch.device) -> WeightSource:
    """Return the plan's safetensors, or seeded random weights."""
    if plan.weights is not None:
        return SafetensorsSource(plan.weights)
    return RandomSource(_shapes(_on_meta(plan)), seed=seed, std=plan.config.initializer_range, device=device)


def _streamed_source(plan: ModelPlan, options: BuildOptions) -> WeightSource | None:
    """Return a source whose tensors map 1:1 to parameters, so that each rank can stream its shards.

    Return None if only transformers can load the model: it renames, merges or scales tensors on loading, or
    the files contain buffers.
    """
    if not (weight_files(plan.weights) if plan.weights else plan.is_known_family):
        return None
    source, model = weight_source(plan, seed=options.seed, device=options.device), _on_meta(plan)
    tied, parameters = tied_names(model), _shapes(model)
    stored = {name: shape for name, shape in source.shapes().items() if name not in tied}
    return source if stored == parameters and set(model.state_dict()) - tied == parameters.keys() else None


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in model.named_parameters()}


def _on_meta(plan: ModelPlan) -> nn.Module:
    with torch.device("meta"):
        return _from_config(plan)


def count_parameters(plan: ModelPlan) -> int:
    """Count the parameters of the Hugging Face model, tied weights once."""
    return sum(p.numel() for p in _on_meta(plan).parameters())


def no_gather(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors as they are: the `gather` of an unsharded model."""
    return [tensor.detach() for tensor in tensors]


def export_tensors(model: nn.Module, gather: Gather = no_gather) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's weights under Hugging Face names, one by one; collective if `gather` is."""
    return hf_state(model, gather) if isinstance(model, HFCausalLM) else te_to_hf(model, gather)
