"""DeepSpeed ZeRO: its engine owns backward, clipping and the step; here is what it must be told and asked.

A file of ds_configs/ says how to shard. What a flag decides is not its business, and a value there that says
otherwise is an error, so that one command is one run in every sharding mode.

DeepSpeed's own checkpoints are pickles tied to a stage and a number of ranks. Ours hold FP32 weights and
moments by parameter name, cut into rows: `Zero.state` translates between those and ZeRO's flat partitions.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from training import optim
from training.config import Config, nearest
from training.sharding import SingleDevice, StepOutcome

DEEPSPEED = "deepspeed==0.19.8"
ROOT = Path(__file__).resolve().parent.parent

CONFIGS = {
    "ds_zero1": "ds_configs/zero1.json",
    "ds_zero2": "ds_configs/zero2.json",
    "ds_zero3": "ds_configs/zero3.json",
    "ds_zero3_offload": "ds_configs/zero3_offload.json",
}

# Settings that may stand in a file and change nothing but speed, memory or what DeepSpeed itself prints.
FREE = ("zero_optimization", "comms_logger", "flops_profiler", "wall_clock_breakdown", "memory_breakdown")

# Sections of a DeepSpeed file whose job a flag has here.
FLAGS_INSTEAD = {
    "optimizer": "--learning_rate, --weight_decay, --adam_beta1, --adam_beta2 and --adam_epsilon",
    "scheduler": "--lr_scheduler and --num_warmup_steps",
    "fp16": "--mixed_precision",
    "amp": "--mixed_precision",
    "torch_autocast": "--mixed_precision",
    "activation_checkpointing": "--gradient_checkpointing",
    "compile": "--compile_model",
    "wandb": "--use_wandb",
    "tensorboard": "--log_dir",
    "comet": "--use_wandb or --log_dir",
    "csv_monitor": "metrics.jsonl, which every run writes",
    "checkpoint": "--save_interval and --keep_last",
}

# Parts of zero_optimization that this program has no place for.
UNSUPPORTED = {
    "legacy_stage1": "was removed from DeepSpeed",
    "zenflow": "updates parts of the weights late",
    "zero_quantized_weights": "quantizes weights, which --mixed_precision fp8 does",
    "zero_quantized_nontrainable_weights": "quantizes weights, which --mixed_precision fp8 does",
    "zero_quantized_gradients": "quantizes gradients, whose dtype is --grad_reduce_dtype",
}


def merge_settings(
    path_or_short_name: str, cfg: Config, world_size: int, parameter_dtype: torch.dtype
) -> dict[str, Any]:
    """The DeepSpeed configuration: how to shard from a file, all else from the flags.

    `path_or_short_name`: a JSON file, relative to the working directory or to this repository, or a key of
    `CONFIGS`. ValueError if the file cannot be read, does not shard, or contradicts a flag; RuntimeError
    without DeepSpeed.
    """
    path = CONFIGS.get(path_or_short_name, path_or_short_name)
    where = f"--deepspeed_config {path}"
    given = _read(path, where)
    if not isinstance(given, dict):
        raise ValueError(f"{where}: must hold one JSON object, holds {type(given).__name__}")
    decided, flags = _decided(cfg, world_size, parameter_dtype)
    for key, value in given.items():
        if key in FREE:
            continue
        if key in FLAGS_INSTEAD:
            if not (isinstance(value, dict) and value.get("enabled") in (False, "auto")):
                raise ValueError(f"{where}: {key} is not read; leave it out and use {FLAGS_INSTEAD[key]}")
        elif key in decided:
            _compare(where, key, value, decided[key], flags)
        else:
            raise ValueError(
                f"{where}: {key} is no setting that belongs here{nearest(key, [*FREE, *decided])}; the file "
                "says how to shard (zero_optimization), flags decide the rest"
            )
    zero = _check_zero(given.get("zero_optimization"), where)
    return {key: given[key] for key in FREE if key in given} | {"zero_optimization": zero} | decided


def _read(path: str, where: str) -> Any:
    candidates = [Path(path).expanduser(), ROOT / path]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise ValueError(f"{where}: no such file; ds_configs/ has {', '.join(sorted(CONFIGS.values()))}")
    try:
        return json.loads(found.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}: cannot be read as JSON: {error}") from None


def _decided(cfg: Config, world_size: int, parameter_dtype: torch.dtype) -> tuple[dict[str, Any], dict]:
    """What flags decide, in DeepSpeed's terms, and {dotted key: the flags that decide it}."""
    optimizer, reduce_dtype = cfg.optim, cfg.sharding.grad_reduce_dtype
    micro, steps = optimizer.batch_size, optimizer.gradient_accumulation_steps
    settings = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "train_batch_size": micro * steps * world_size,
        "gradient_clipping": optimizer.max_grad_norm,
        # The default is the weights' dtype: BF16 sums, which lose what one rank adds to many.
        "communication_data_type": reduce_dtype,
        # Sums of several micro-batches need FP32; one gradient, reduced, is no more exact than its terms.
        "data_types": {"grad_accum_dtype": "fp32" if steps > 1 else None},
        # Without the check a step with a gradient that is not finite would be taken.
        "bf16": {"enabled": parameter_dtype == torch.bfloat16, "check_grad_overflow": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's own compiles a C++ extension at the first start
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},  # waits for the device before every forward pass
    }
    flags = {
        "train_micro_batch_size_per_gpu": f"--batch_size {micro}",
        "gradient_accumulation_steps": f"--gradient_accumulation_steps {steps}",
        "train_batch_size": (
            f"--batch_size {micro} x --gradient_accumulation_steps {steps} x {world_size} ranks"
        ),
        "gradient_clipping": f"--max_grad_norm {optimizer.max_grad_norm}",
        "communication_data_type": f"--grad_reduce_dtype {reduce_dtype}",
        "bf16.enabled": f"--mixed_precision {cfg.precision.mixed_precision}",
    }
    return settings, flags


def _compare(where: str, key: str, value: Any, decided: Any, flags: dict[str, str]) -> None:
    if isinstance(decided, dict) and isinstance(value, dict):
        for name, inner in value.items():
            _compare(where, f"{key}.{name}", inner, decided.get(name), flags)
    elif value != "auto" and value != decided:
        by = f"{flags[key]} makes it" if key in flags else "here it is always"
        raise ValueError(
            f"{where}: {key} is {json.dumps(value)}, but {by} {json.dumps(decided)}; leave it out"
        )


def _check_zero(zero: Any, where: str) -> dict[str, Any]:
    """zero_optimization without "auto" values, as DeepSpeed will accept it. ValueError names the key."""
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        raise ValueError(
            f"{where}: zero_optimization.stage is {json.dumps(stage)}; give 1, 2 or 3, or use "
            "--sharding_mode ddp to shard nothing"
        )
    zero = {key: value for key, value in zero.items() if value != "auto"}
    for key, reason in UNSUPPORTED.items():
        if zero.get(key):
            raise ValueError(f"{where}: zero_optimization.{key} {reason}; leave it out")
    if zero.get("compute_grad_norm") is False:
        raise ValueError(f"{where}: zero_optimization.compute_grad_norm must be true, the norm is logged")
    if zero.get("zero_hpz_partition_size", 1) != 1:
        raise ValueError(f"{where}: zero_optimization.zero_hpz_partition_size: use --sharding_mode hsdp")
    for key in ("offload_param", "offload_optimizer"):
        offload = zero.get(key) or {}
        if not isinstance(offload, dict):
            raise ValueError(f'{where}: zero_optimization.{key} must be like {{"device": "cpu"}}')
        if offload.get("device", "none") not in ("none", "cpu"):
            raise ValueError(f'{where}: zero_optimization.{key}.device must be "cpu", or leave {key} out')
        if offload.get("super_offload") or offload.get("ratio", 1) != 1:
            raise ValueError(
                f"{where}: zero_optimization.{key} is all or nothing: no ratio, no super_offload"
            )
    if stage != 3 and (zero.get("offload_param") or {}).get("device", "none") != "none":
        raise ValueError(f"{where}: zero_optimization.offload_param needs stage 3, this is stage {stage}")
    _import_deepspeed()
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    try:
        DeepSpeedZeroConfig(**zero)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(["zero_optimization", *map(str, first["loc"])])
        raise ValueError(f"{where}: {key}: {first['msg']} (DeepSpeed)") from None
    return zero


def _import_deepspeed() -> Any:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it warns when it has to find out
    try:
        import deepspeed
    except ImportError as error:
        raise RuntimeError(
            f"--sharding_mode with DeepSpeed: it cannot be imported ({error}); `pip install {DEEPSPEED}`, "
            "or use --sharding_mode fsdp_full"
        ) from None
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    logger.addFilter(_not_a_skipped_step)
    # Its calls of what newer torch renames, one warning per collective.
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.*deprecated")
    # None of its compiled extensions is used; on the CPU it would spend a minute on building one.
    deepspeed.ops.__compatible_ops__ = {}
    return deepspeed


def _not_a_skipped_step(record: logging.LogRecord) -> bool:
    return "OVERFLOW!" not in record.getMessage()  # the loop reports it, with loss and norm


@dataclass(frozen=True)
class Fragment:
    """This rank's part of a parameter: its flattened elements from `start` on are `flat[offset:][:size]`."""

    flat: Tensor  # an FP32 partition as the optimizer steps it, of many parameters' fragments
    offset: int
    start: int
    size: int


class Zero(SingleDevice):
    """ZeRO stage 1, 2 or 3, with or without offload to the CPU, under torch AdamW.

    FP32 master weights are ZeRO's; the model's parameters are in the compute dtype. `discard` and `state`
    reach into DeepSpeed's optimizers as they are in `DEEPSPEED`, which has no call for either.
    """

    master_home = "zero"

    def __init__(self, device: torch.device, cfg: Config):
        super().__init__(device, cfg)
        self.mode = cfg.sharding.mode
        if not dist.is_initialized():
            raise RuntimeError(
                f"--sharding_mode {self.mode}: DeepSpeed needs a process group, even for one rank; start "
                "with torchrun --nproc_per_node N"
            )
        full = cfg.precision.mixed_precision == "fp32"
        name = cfg.sharding.deepspeed_config or self.mode
        dtype = torch.float32 if full else torch.bfloat16
        self.settings = merge_settings(name, cfg, self.world_size, dtype)
        self.stage = self.settings["zero_optimization"]["stage"]
        # Its hooks give a layer's weights back after the second forward pass; only the graph of that pass
        # fetches them again for backward.
        self.reentrant = self.stage == 3
        self.mesh = init_device_mesh("cpu", (self.world_size,))  # of checkpoints

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The engine, and `optimizer` itself: its groups are live, its state is of the flat partitions."""
        deepspeed = _import_deepspeed()
        # DeepSpeed takes its device from it, at the start and later on, whatever device the model is on.
        os.environ.setdefault("LOCAL_RANK", str(self.device.index or 0))
        with redirect_stdout(io.StringIO()):  # memory reports that no log level silences
            self.engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                config=copy.deepcopy(self.settings),
                dist_init_required=False,
            )
        return self.engine, optimizer

    def accumulating(self, model: nn.Module, *, last: bool) -> AbstractContextManager:
        # Told, not counted: the last window of an epoch may be shorter than the others.
        self.engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, model: nn.Module, loss: Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, usable: Tensor, max_norm: float
    ) -> StepOutcome:
        """As in the base class; DeepSpeed reports a norm that is not finite as infinite."""
        assert max_norm == self.settings["gradient_clipping"]
        if self.max((~usable).float().to(self.device)).item():
            self.discard(model, optimizer)
            return StepOutcome(torch.full((), float("nan"), device=self.device), False)
        self.engine.step()
        norm = torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32, device=self.device)
        return StepOutcome(norm, self.engine.was_step_applied())

    def discard(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        zero = self.engine.optimizer
        if self.stage == 3:
            zero._overflow_clean_up(1.0)
            return
        zero.zero_grad(set_to_none=True)
        if self._is_bf16_optimizer():
            return
        zero.micro_step_id = -1
        zero.averaged_gradients = dict.fromkeys(zero.averaged_gradients)
        zero.all_grad_tensors = dict.fromkeys(zero.all_grad_tensors)
        if zero.cpu_offload:
            zero.reset_cpu_buffers()

    def _is_bf16_optimizer(self) -> bool:
        """Stage 1 with FP32 accumulation of BF16 gradients is a class of its own in DeepSpeed."""
        return hasattr(self.engine.optimizer, "bf16_groups")

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        if self.stage != 3:
            return super().gather(tensors)
        import deepspeed

        with deepspeed.zero.GatheredParameters(tensors):
            return [tensor.detach().clone() for tensor in tensors]

    # Checkpoints

    @torch.no_grad()
    def state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Weights and moments by parameter name, this rank's rows of each, and what puts them back.

        Copies on the CPU, cut along dim 0 as FSDP2 does; collective, as is the function returned, which also
        renews the weights that forward passes use. One parameter at a time is whole.
        """
        module = self.engine.module
        tensors: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            master = self._rows(parameter, None)
            if parameter.dtype == torch.float32:
                tensors[f"model/{name}"] = master
            else:
                halves = optim.split_master(master.to_local())
                weight, remainder = (self._distributed(half, master.shape) for half in halves)
                tensors |= {f"model/{name}": weight, f"optimizer/{name}.master_param": remainder}
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[f"optimizer/{name}.{key}"] = self._rows(parameter, key)
        for prefix, child in module.named_modules():
            for name, buffer in child.named_buffers(prefix, recurse=False):
                if name.rpartition(".")[2] not in child._non_persistent_buffers_set:
                    tensors[f"model/{name}"] = buffer

        @torch.no_grad()
        def put_back() -> None:
            for name, parameter in module.named_parameters():
                rows = tensors[f"model/{name}"].to_local()
                if parameter.dtype != torch.float32:
                    remainder = tensors[f"optimizer/{name}.master_param"].to_local()
                    rows = optim.merge_master(rows, remainder)
                self._set_rows(parameter, None, rows)
                for key in ("exp_avg", "exp_avg_sq"):
                    self._set_rows(parameter, key, tensors[f"optimizer/{name}.{key}"].to_local())
            self._renew_weights()

        return tensors, put_back

    def _fragment(self, parameter: nn.Parameter) -> Fragment | None:
        zero = self.engine.optimizer
        if self.stage == 3:
            group, offset, size = zero.grad_position[zero.get_param_id(parameter)]
            start = size * self.rank
            size = min(size, parameter.ds_numel - start)  # the last ranks' ends are padding
            return (
                Fragment(zero.fp32_partitioned_groups_flat[group], offset, start, size) if size > 0 else None
            )
        if (mapping := parameter._hp_mapping) is None:
            return None
        (flat,) = zero.optimizer.param_groups[mapping.param_group_index]["params"]
        inside, whole = mapping.hp_fragment_address, mapping.lp_fragment_address
        return Fragment(flat, inside.start, whole.start, whole.numel)

    def _values(self, fragment: Fragment, key: str | None) -> Tensor:
        """The master weights (None) or a moment of a fragment; a view."""
        source = fragment.flat
        if key is not None:
            state = self.engine.optimizer.state
            if not state[source]:
                optim.allocate(self.engine.optimizer.optimizer, source)
            source = state[source][key]
        return source.detach().narrow(0, fragment.offset, fragment.size)

    def _rows(self, parameter: nn.Parameter, key: str | None) -> DTensor:
        fragment, shape = self._fragment(parameter), _shape(parameter)
        pieces = (fragment.start, self._values(fragment, key)) if fragment else None
        whole = self._assemble(shape.numel(), pieces).view(shape)
        start, stop = self._own_rows(shape)
        return self._distributed((whole[start:stop] if shape else whole).cpu(), shape)

    def _set_rows(self, parameter: nn.Parameter, key: str | None, rows: Tensor) -> None:
        fragment, shape = self._fragment(parameter), _shape(parameter)
        width = shape[1:].numel()
        pieces = (self._own_rows(shape)[0] * width, rows.flatten()) if shape or self.rank == 0 else None
        whole = self._assemble(shape.numel(), pieces)
        if fragment:
            self._values(fragment, key).copy_(whole.narrow(0, fragment.start, fragment.size))

    def _own_rows(self, shape: torch.Size) -> tuple[int, int]:
        """torch.chunk's share of dim 0, which may be empty."""
        if not shape:
            return 0, 1
        size = -(-shape[0] // self.world_size)
        return min(size * self.rank, shape[0]), min(size * (self.rank + 1), shape[0])

    def _assemble(self, numel: int, piece: tuple[int, Tensor] | None) -> Tensor:
        """The whole of what every rank has a disjoint piece of: (first element, flat FP32 tensor)."""
        bits = torch.zeros(numel, dtype=torch.int32, device=self.device)
        if piece is not None:
            start, values = piece
            bits[start : start + values.numel()] = values.contiguous().view(torch.int32).to(self.device)
        # Sums of bits are exact; FP32 sums would turn -0.0 into 0.0.
        if self.world_size > 1:
            dist.all_reduce(bits)
        return bits.view(torch.float32)

    def _distributed(self, local: Tensor, shape: torch.Size) -> DTensor:
        stride = torch.empty(shape, device="meta").stride()
        placement = Shard(0) if shape else Replicate()
        return DTensor.from_local(
            local.contiguous(), self.mesh, [placement], run_check=False, shape=shape, stride=stride
        )

    def _renew_weights(self) -> None:
        """Round the master weights to what forward passes use, on every rank."""
        zero = self.engine.optimizer
        if self.stage != 3:
            zero.update_lp_params()
            return
        zero._partition_all_parameters()  # small ones stay whole between steps, and would stay as they are
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)


def _shape(parameter: nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)
