"""Specification of a model: `find_model` resolves a name to configuration and weights, and checks them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from fp8_suite.core.errors import UserError, bad_setting, first_line, one_line
from fp8_suite.core.gpus import AMPERE
from fp8_suite.te_models.families import FAMILIES
from fp8_suite.te_models.presets import LOCAL_PRESETS, PRESETS, require_model
from fp8_suite.te_models.quantized.reader import METHODS, MODELOPT_FILE
from fp8_suite.te_models.shape import ModelShape
from fp8_suite.te_models.sources import RandomSource, SafetensorsSource, WeightSource, weight_files
from fp8_suite.te_models.weights import EMBEDDING, LM_HEAD
from torch import Tensor, nn

NEEDS_CODE = "it needs Python code from its repository; read that code, then add --trust_remote_code"
SAMPLES, SAMPLE_BYTES = 16, 2**16  # number and size of the samples that `digests` reads of a weight file


@dataclass(frozen=True)
class ModelSpec:
    """Model to build: its configuration, never changed, and its weights' folder (None: random weights)."""

    name: str
    config: Any
    weights: Path | None
    trust_remote_code: bool = False
    quantization: dict[str, Any] | None = None  # quantization_config of FP8 weights; `config` lacks it
    dequantized: str | None = None  # number and form of FP8 tensors, for the run's records
    on_one_grid: frozenset[str] = frozenset()  # names of its FP8 weights, see `WeightSource`
    dithers: bool = False  # these start anywhere in their rounding intervals

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


def find_model(
    name: str, *, init: str, use_te: bool, trust_remote_code: bool = False, max_seq_length: int | None = None
) -> ModelSpec:
    """Resolve `--model_name` and `--init`, downloading configuration and weights where needed.

    `max_seq_length`, by default the model's, must not exceed a sliding window, which TE layers lack.
    Raise UserError if the model does not exist, cannot be downloaded, or cannot be trained.
    """
    require_model(name, init)
    random = init == "random" or name in LOCAL_PRESETS
    config = _read_config(name, init, random=random, trust_remote_code=trust_remote_code)
    quantization = vars(config).pop("quantization_config", None)
    spec = ModelSpec(name, config, None, trust_remote_code, quantization=quantization)
    _refuse_untrainable(spec)
    if use_te:
        refuse_te(name, config, max_seq_length)
        if spec.uses_remote_code:
            raise bad_setting(
                "TE layers would replace the model's own Python code; drop --use_te or --trust_remote_code",
                use_te=True,
                model_name=name,
            )
    if not random:
        spec = replace(spec, weights=_find_weights(name))
        if not quantization and (spec.weights / MODELOPT_FILE).exists():
            spec = replace(spec, quantization={"quant_method": "modelopt"})
        if use_te or spec.quantization or weight_files(spec.weights):
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


def _read_config(name: str, init: str, *, random: bool, trust_remote_code: bool) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    if random and name in PRESETS:
        fields = dict(PRESETS[name])
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    exports = " or ".join(str(path.parent) for path in sorted(Path(name).glob("export*/config.json")))
    if Path(name, "metrics.jsonl").exists() and exports:
        raise bad_setting(f"this is a run folder; give its exported model, {exports}", model_name=name)
    if Path(name, "manifest.json").exists() and not Path(name, "config.json").exists():
        way = "give an export, such as RUN/export; docs/training.md exports a kept checkpoint"
        raise bad_setting(f"this is a checkpoint; {way}", model_name=name)
    if Path(name, "adapter_config.json").exists() and not Path(name, "config.json").exists():
        raise bad_setting("this has adapters only; give a merged model, such as RUN/export", model_name=name)
    try:
        fields, _ = PretrainedConfig.get_config_dict(name)
        auto_map, model_type = fields.get("auto_map") or {}, fields.get("model_type")
        if trust_remote_code or "AutoConfig" not in auto_map or model_type in CONFIG_MAPPING:
            return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        presets = "a preset of te_models/presets.py" if random else ", ".join(sorted(LOCAL_PRESETS))
        others = "use --init random" if name in PRESETS else presets
        way = (
            "Give a local folder or a hub id"
            if init == "pretrained"
            else f"Give a local folder, a hub id or {others}"
        )
        if "gated" in str(error):
            way = "Accept its licence on the hub, and log in with `hf auth login`"
        raise bad_setting(f"{first_line(error)} {way}", model_name=name) from None
    except Exception as error:  # fields with wrong names or types raise errors of many types
        raise _wrong_config(name, error) from error
    raise bad_setting(NEEDS_CODE, model_name=name)


def _wrong_config(name: str, error: Exception) -> UserError:
    return bad_setting(f"its config.json: {type(error).__name__}: {one_line(error)}", model_name=name)


def _refuse_untrainable(spec: ModelSpec) -> None:
    name, config = spec.name, spec.config
    if auto_class(config, trust_remote_code=spec.trust_remote_code) is None:
        if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
            raise bad_setting(NEEDS_CODE, model_name=name)
        raise bad_setting(
            f"transformers has no causal language model of type {config.model_type!r}; give another model",
            model_name=name,
        )
    if spec.is_known_family:
        try:
            on_meta(spec)
        except Exception as error:
            raise _wrong_config(name, error) from error
    if getattr(config.get_text_config(), "is_causal", True) is False:  # an encoder's; TE layers are causal
        raise bad_setting("is_causal is false in its config.json; give a causal model", model_name=name)
    if spec.quantization and (method := spec.quantization.get("quant_method")) not in METHODS:
        reason = f"its weights are quantized by {method}; give the original model, or one in FP8"
        raise bad_setting(reason, model_name=name)


def refuse_te(name: str, config: Any, max_seq_length: int | None = None) -> None:
    """Raise UserError if this model cannot be built from TE layers for sequences of this length."""
    family, unknown = FAMILIES.get(config.model_type), f"model type {config.model_type!r} is not supported"
    reason = family.unsupported(config) if family else unknown
    if reason:
        way = f"Types with TE layers: {', '.join(FAMILIES)}; run this model without --use_te"
        raise bad_setting(f"{reason}. {way}", use_te=True, model_name=name)
    refuse_length(name, config, max_seq_length or config.max_position_embeddings)


def refuse_length(name: str, config: Any, length: int) -> None:
    """Raise UserError if TE layers cannot represent the model's attention in sequences of this length."""
    shape = ModelShape.from_hf_config(config)
    if not shape.sees_all(length):
        reason = f"TE layers have no sliding window, and {name} has one of {shape.window} tokens"
        way = "use at most that length, or drop --use_te"
        raise bad_setting(f"{reason}; {way}", max_seq_length=length, use_te=True)


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

    Return the spec tied as in the files: a stored LM head that differs from the embedding is not tied, as in
    transformers.
    """
    source = SafetensorsSource(spec.weights, spec.quantization)
    if spec.quantization:
        dequantized = f"{len(source.fp8)} tensors ({spec.quantization['quant_method']})"
        spec = replace(spec, dequantized=dequantized, on_one_grid=frozenset(source.on_one_grid))
    has_both = {EMBEDDING, LM_HEAD} <= source.shapes().keys()
    if has_both and getattr(spec.config, "tie_word_embeddings", False):
        tied = torch.equal(source.get(EMBEDDING), source.get(LM_HEAD))
        spec = _with_fields(spec, tie_word_embeddings=tied)
    if use_te:
        model = on_meta(spec)
        source.require(parameter_shapes(model), optional=tied_names(model))
    return spec


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


def inference_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for inference: BF16, FP16 on a GPU without BF16, FP32 on a CPU."""
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= AMPERE else torch.float16


def auto_class(config: Any, *, trust_remote_code: bool = False) -> Any:
    """Return transformers' class that builds this model, or None.

    AutoModelForCausalLM if it can; otherwise AutoModelForImageTextToText for a decoder with an image encoder,
    of which only the text is trained.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForCausalLM
    if type(config) in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM
    reads_images = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if reads_images and not config.is_encoder_decoder else None


def from_config(spec: ModelSpec, dtype: torch.dtype | None = None) -> nn.Module:
    """Build transformers' model with any weights, on torch's current device."""
    kind = auto_class(spec.config, trust_remote_code=spec.trust_remote_code)
    return kind.from_config(spec.config, dtype=dtype, trust_remote_code=spec.trust_remote_code)


def on_meta(spec: ModelSpec, dtype: torch.dtype | None = None) -> nn.Module:
    """Build transformers' model on the meta device."""
    with torch.device("meta"):
        return from_config(spec, dtype)


def parameter_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shape of every parameter by name, tied ones once."""
    return {name: p.shape for name, p in model.named_parameters()}


def tied_names(model: nn.Module) -> set[str]:
    """Return the names of parameters that share storage with an earlier parameter."""
    first = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - first


def count_parameters(spec: ModelSpec) -> int:
    """Count the parameters of the Hugging Face model, tied weights once."""
    return sum(p.numel() for p in on_meta(spec).parameters())


def linear_sizes(spec: ModelSpec) -> dict[str, int]:
    """Return input plus output features of the Hugging Face model's linear layers without its LM head."""
    model = on_meta(spec)
    head, modules = model.get_output_embeddings(), model.named_modules()
    return {name: sum(m.weight.shape) for name, m in modules if isinstance(m, nn.Linear) and m is not head}


def weight_source(spec: ModelSpec, *, seed: int, device: torch.device) -> WeightSource:
    """Return the spec's safetensors, FP8 dequantized on `device`, or seeded random weights."""
    if spec.weights is not None:
        return SafetensorsSource(spec.weights, spec.quantization, device, seed if spec.dithers else None)
    return RandomSource(
        parameter_shapes(on_meta(spec)), seed=seed, std=spec.config.initializer_range, device=device
    )


def base_tensors(spec: ModelSpec, *, seed: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield the Hugging Face model's weights from their source, tied ones once."""
    source = weight_source(spec, seed=seed, device=device)
    return ((name, source.get(name)) for name in parameter_shapes(on_meta(spec)))
