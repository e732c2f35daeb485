"""Models: `plan_model` finds one, `build_model` gives its TE or its Hugging Face form."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError
from torch import Tensor, nn

from core.errors import first_line
from core.hub import refuse_missing_folder, refuse_silent_hub
from te_models.engine import Backend, NativeOptions
from te_models.families import FAMILIES
from te_models.hugging_face import (
    HFCausalLM,
    hf_state,
    materialize,
    parameters_on_meta,
    refuse_leaking_packing,
    tied_names,
)
from te_models.presets import LOCAL_PRESETS, PRESETS, meant
from te_models.weights import (
    EMBEDDING,
    LM_HEAD,
    Gather,
    RandomSource,
    SafetensorsSource,
    WeightSource,
    fill_named,
    load_te,
    require_safetensors,
    te_to_hf,
    weight_files,
)

UNPICKLERS = ("serialization.py", "_weights_only_unpickler.py")  # of torch; damage raises any error there
SAMPLED_PLACES, SAMPLED_BYTES = 16, 2**16  # of a weights file, by `identity`


@dataclass(frozen=True)
class ModelPlan:
    """What is to be built: the configuration, and the folder of its weights (None: random)."""

    name: str
    config: Any
    weights: Path | None
    trust_remote_code: bool = False  # the model's own Python code may run

    @property
    def short_name(self) -> str:
        """The name without its organisation or folder, for run folders and tags."""
        return self.name.rstrip("/").split("/")[-1]

    @property
    def family(self) -> str:
        return self.config.model_type

    @property
    def own_code(self) -> bool:
        """Whether it is a class of its repository, which may be another than its family's."""
        brought = getattr(self.config, "auto_map", None) or {}
        return self.trust_remote_code and "AutoModelForCausalLM" in brought

    @property
    def of_known_family(self) -> bool:
        """Whether weights have the names of a family with a TE form, and logits are `lm_head(hidden)`."""
        return self.family in FAMILIES and not self.own_code


def plan_model(
    name: str, *, init: str, use_te: bool, cache_dir: str | None = None, trust_remote_code: bool = False
) -> ModelPlan:
    """Resolve `--model_name` and `--init`, downloading configuration and weights where they are needed.

    ValueError if there is no such model, its hub is out of reach, or `use_te` has no form for it.
    """
    random = init == "random" or (init == "auto" and name in LOCAL_PRESETS)
    if not random and name in LOCAL_PRESETS:
        raise ValueError(f"--init pretrained: the preset {name} has no weights; use --init random")
    config = _config(name, random=random, cache_dir=cache_dir, trust_remote_code=trust_remote_code)
    if use_te:
        refuse_te(name, config)
        if ModelPlan(name, config, None, trust_remote_code).own_code:
            raise ValueError(
                f"--use_te --model_name {name}: TE layers would not do what the model's own Python code "
                "does; drop one of --use_te and --trust_remote_code"
            )
    if getattr(config.get_text_config(), "is_causal", True) is False:
        raise ValueError(
            f"--model_name {name}: is_causal is false in its config.json: tokens see the ones after them, "
            "so the next one is no prediction; take a causal model, or remove that line"
        )
    if quantized := getattr(config, "quantization_config", None):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else "unknown"
        raise ValueError(
            f"--model_name {name}: its weights are quantized (quant_method {method}), which cannot be "
            "trained; give the model that they were made from"
        )
    weights = None if random else _weights_folder(name, cache_dir)
    if use_te and weights:
        require_safetensors(weights)
    if weights and getattr(config, "tie_word_embeddings", False) and _has_own_head(weights):
        config.tie_word_embeddings = False
    return ModelPlan(name, config, weights, trust_remote_code)


def _has_own_head(folder: Path) -> bool:
    """Whether the files hold a head that is not the embedding, which transformers does not tie either."""
    source = SafetensorsSource(folder) if weight_files(folder) else None
    if source is None or not {EMBEDDING, LM_HEAD} <= source.shapes().keys():
        return False
    return not torch.equal(source.get(EMBEDDING), source.get(LM_HEAD))


def refuse_te(name: str, config: Any) -> None:
    """ValueError where `--use_te` has no form for this model."""
    family = FAMILIES.get(config.model_type)
    reason = family.unsupported(config) if family else f"model type {config.model_type!r} has no TE form yet"
    if reason:
        raise ValueError(
            f"--use_te --model_name {name}: {reason}. TE families: {', '.join(FAMILIES)}; "
            "run this model without --use_te"
        )


def _config(name: str, *, random: bool, cache_dir: str | None, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    if random and name in PRESETS:
        fields = dict(PRESETS[name])
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    _refuse_mistaken(name)
    try:
        refuse_silent_hub(name, ("config.json",), cache_dir)
        return AutoConfig.from_pretrained(name, cache_dir=cache_dir, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"--model_name {name}: it brings its own Python code; read that, then add --trust_remote_code"
            ) from None
        way = " or use --init random" if name in PRESETS else " (presets: te_models/presets.py)"
        raise ValueError(
            f"--model_name {name}: {first_line(error)} Give a local folder or a hub id{way}"
        ) from None


def _refuse_mistaken(name: str) -> None:
    """ValueError for a name that is a mistake, which the hub need not be asked for."""
    refuse_missing_folder("model_name", name)
    if (preset := meant(name)) and not Path(name).exists():
        raise ValueError(f"--model_name {name}: there is no such preset or folder; did you mean {preset!r}?")
    of_run = Path(name, "export")
    if Path(name, "metrics.jsonl").exists() and of_run.exists():
        raise ValueError(f"--model_name {name}: is a run folder; give the model that it exported, {of_run}")


def _weights_folder(name: str, cache_dir: str | None) -> Path:
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        wanted = ["*.safetensors*", "*.json", "*.py"]
        twice = ["consolidated*", "original/*"]  # the same weights in the authors' own layout
        return Path(
            snapshot_download(name, cache_dir=cache_dir, allow_patterns=wanted, ignore_patterns=twice)
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"--model_name {name}: the weights cannot be fetched ({first_line(error)}); give a "
            "local folder, log in with `hf auth login` if the model is gated, or use --init random"
        ) from None


def identity(plan: ModelPlan) -> dict[str, str]:
    """What tells two copies of a model apart: digests of its configuration and of its weights' files.

    A file counts by its size and by its first bytes, which hold the names and shapes of its tensors, and
    some from all over it: quick for any size, and another revision of a model differs nearly everywhere.
    """
    settings = {k: v for k, v in plan.config.to_diff_dict().items() if not k.startswith("_")}
    text = json.dumps(settings, sort_keys=True, default=str)
    found = {"configuration": xxhash.xxh3_64_hexdigest(text.encode())}
    if plan.weights is not None:
        digest = xxhash.xxh3_64()
        for path in weight_files(plan.weights):
            size = path.stat().st_size
            digest.update(f"{path.name} {size} ".encode())
            with path.open("rb") as file:
                for place in range(SAMPLED_PLACES):
                    file.seek(size * place // SAMPLED_PLACES)
                    digest.update(file.read(SAMPLED_BYTES))
        found["weights"] = digest.hexdigest()
    return found


def build_model(
    plan: ModelPlan,
    *,
    te_backend: Backend | None,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    packed: bool,
    max_positions: int,
    gradient_checkpointing: bool = False,
    reentrant: bool = False,
    compile_layers: bool = False,
    shard: Callable[[nn.Module], None] | None = None,
    parameter_device: torch.device | None = None,
    weight_recipe: Any = None,
    compute_dtype: torch.dtype | None = None,
    convert: Callable[[HFCausalLM], None] | None = None,
    native: NativeOptions | None = None,
) -> nn.Module:
    """The model on `device` in `dtype`; its TE and Hugging Face forms hold the same weights.

    `te_backend` says whose TE layers it is made of, see `te_models.engine`; None: the Hugging Face form.
    `shard` cuts the model into shards while it has no storage yet, so that no rank ever holds it whole; on
    the CPU where only transformers can read its files.
    `parameter_device` is where the shards stay, if not on `device`. `weight_recipe` prepares a TE model for
    `quantize_weights`. `reentrant` recomputation builds autograd's graph anew, as ZeRO-3's hooks need it.
    `compute_dtype` is what forward passes compute in (default: `dtype`). `convert` replaces linear layers of
    a Hugging Face model before it is sharded; parameters keep their names. `native` is of TE's own layers.
    """
    recomputation = {"gradient_checkpointing": gradient_checkpointing, "reentrant": reentrant}
    if te_backend is None:

        def prepare(inner: nn.Module) -> HFCausalLM:
            # A padding token may be the end of a turn, too, which must learn; labels mask what is padding.
            for module in inner.modules():
                if isinstance(module, nn.Embedding):
                    module.padding_idx = None
            model = HFCausalLM(inner, known=plan.of_known_family, **recomputation)
            if convert:
                convert(model)
            if shard:
                shard(model)
            return model

        if shard and (source := _streamed_source(plan, seed, device)):
            model = _filled_by_shards(plan, dtype, parameter_device or device, prepare, source)
        else:
            # Weights from files wait on the CPU to be cut; random ones are of their device's generator.
            whole_on = torch.device("cpu") if shard and plan.weights else device
            model = prepare(_build_hugging_face(plan, dtype, whole_on, seed))
        model.choose_attention(device, compute_dtype or dtype)
        if packed:
            sharded = shard is not None and dist.is_initialized()
            refuse_leaking_packing(model.eval(), plan.name, sharded=sharded)
        if compile_layers:
            model.compile_blocks()
        return model.train()
    from te_models.decoder import TECausalLM

    model = TECausalLM(
        plan.config,
        backend=te_backend,
        attention="thd" if packed else "bshd",
        dtype=dtype,
        max_positions=max_positions,
        **recomputation,
        weight_recipe=weight_recipe,
        native=native,
    )
    if shard:
        shard(model)
        model.let_te_keep_fp8_weights()
    model.materialize(device, parameter_device)
    load_te(model, weight_source(plan, seed=seed, device=device))
    return model.train()


def _of_damaged_files(error: Exception) -> bool:
    if isinstance(error, (OSError, SafetensorError, UnpicklingError, EOFError)):
        return True
    innermost = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return innermost.parent.name == "torch" and innermost.name in UNPICKLERS


def _filled_by_shards(
    plan: ModelPlan,
    dtype: torch.dtype,
    device: torch.device,
    prepare: Callable[[nn.Module], HFCausalLM],
    source: WeightSource,
) -> HFCausalLM:
    """A Hugging Face model that `prepare` cuts before it has storage, each shard read from `source`."""
    from transformers import AutoModelForCausalLM

    with parameters_on_meta():
        inner = AutoModelForCausalLM.from_config(
            plan.config, dtype=dtype, trust_remote_code=plan.trust_remote_code
        )
    model = prepare(inner)
    materialize(inner, device)
    fill_named(dict(inner.named_parameters()), source)
    return model


def weight_source(plan: ModelPlan, *, seed: int, device: torch.device) -> WeightSource:
    """Where a TE model's weights come from: the plan's safetensors, or seeded random ones."""
    if plan.weights is not None:
        return SafetensorsSource(plan.weights)
    return RandomSource(_hf_shapes(plan), seed=seed, std=plan.config.initializer_range, device=device)


def _streamed_source(plan: ModelPlan, seed: int, device: torch.device) -> WeightSource | None:
    """A source that holds the model's parameters under their own names, and nothing else.

    None if only transformers can load it: files that it renames, joins or scales, or a state of buffers.
    """
    if plan.weights is None:
        return weight_source(plan, seed=seed, device=device) if plan.of_known_family else None
    if not weight_files(plan.weights):  # pickles
        return None
    source, model = SafetensorsSource(plan.weights), _on_meta(plan)
    tied = tied_names(model)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    held = {n: s for n, s in source.shapes().items() if n not in tied and not n.endswith(".inv_freq")}
    return source if held == shapes and set(model.state_dict()) - tied == shapes.keys() else None


def _on_meta(plan: ModelPlan) -> nn.Module:
    """The Hugging Face model without storage."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(plan.config, trust_remote_code=plan.trust_remote_code)


def _hf_shapes(plan: ModelPlan) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in _on_meta(plan).named_parameters()}


def _build_hugging_face(plan: ModelPlan, dtype: torch.dtype, device: torch.device, seed: int) -> nn.Module:
    from transformers import AutoModelForCausalLM

    options = {"dtype": dtype, "trust_remote_code": plan.trust_remote_code}
    if plan.weights is not None:
        # Names of what does not fit come back, below, where transformers would raise with a table.
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        try:
            model, info = AutoModelForCausalLM.from_pretrained(plan.weights, **options)
        except Exception as error:
            if not _of_damaged_files(error):
                raise
            raise ValueError(
                f"--model_name {plan.name}: its weights cannot be read ({first_line(error)}); download them "
                "again, or use --init random"
            ) from None
        if missing := set(info["missing_keys"]) | {key for key, *_ in info["mismatched_keys"]}:
            raise ValueError(
                f"--model_name {plan.name}: the weights lack {', '.join(sorted(missing))}; "
                "give a complete model (transformers would fill them at random)"
            )
        return model.to(device)
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(plan.config, **options)
    if plan.of_known_family:  # the same random weights as the TE form has
        source = weight_source(plan, seed=seed, device=device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(source.get(name))
    return model


def count_parameters(plan: ModelPlan) -> int:
    """Parameters of the Hugging Face model, a tied weight once."""
    return sum(shape.numel() for shape in _hf_shapes(plan).values())


def whole(tensors: list[Tensor]) -> list[Tensor]:
    """The `gather` of a model that is not sharded."""
    return [tensor.detach() for tensor in tensors]


def export_tensors(model: nn.Module, gather: Gather = whole) -> Iterator[tuple[str, Tensor]]:
    """A model's weights under Hugging Face names, one after the other; collective if `gather` is."""
    return hf_state(model, gather) if isinstance(model, HFCausalLM) else te_to_hf(model, gather)
