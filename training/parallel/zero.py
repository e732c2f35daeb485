"""Strategy for DeepSpeed ZeRO, whose engine runs backward, clipping and the optimizer step.

DeepSpeed's own checkpoints are pickles tied to a stage and a number of ranks. The suite's checkpoints contain
FP32 weights and moments by parameter name, sharded by rows. `Zero.state` converts between these rows and
ZeRO's flat partitions.
"""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout

import torch
import torch.distributed as dist
from fp8_suite.core.machine import cores
from fp8_suite.training.config import Config
from fp8_suite.training.optim import adamw, moments
from fp8_suite.training.optim import optimizer as optim
from fp8_suite.training.parallel import ranks
from fp8_suite.training.parallel.strategies import StepOutcome, Strategy
from fp8_suite.training.parallel.zero_settings import CONFIGS, import_deepspeed, merge_settings
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard


class Zero(Strategy):
    """ZeRO stage 1, 2 or 3, with or without CPU offload, under torch AdamW.

    ZeRO holds the FP32 master weights; the model's parameters are in the compute dtype. `discard` and `state`
    use internals of the version pinned in `zero_settings.DEEPSPEED`: it has no public function to discard
    gradients, and its `safe_set_full_fp32_param` fails for padded ZeRO-3 shards.
    """

    owns_masters = True

    def __init__(self, mode: str, device: torch.device, cfg: Config):
        super().__init__(mode, device, cfg)
        path = cfg.sharding.deepspeed_config or CONFIGS[mode]
        merged = ranks.run_on_all_ranks(lambda: merge_settings(path, cfg, self.topology.world_size))
        self.settings = merged[self.topology.rank]
        ranks.agree(f"the settings of --deepspeed_config {path}", self.settings)
        zero = self.settings["zero_optimization"]
        self.stage = zero["stage"]
        steps_on_cpu = (zero.get("offload_optimizer") or {}).get("device") == "cpu"
        if steps_on_cpu and os.environ.get("OMP_NUM_THREADS", "1") == "1":  # torchrun's default
            torch.set_num_threads(max(1, len(cores()) // ranks.local_rank_and_size()[1]))
        # ZeRO 3 frees a layer's weights after each forward pass, also a recomputed one. Hooks in the graph of
        # that pass gather them again for backward, and only the reentrant variant runs backward through it.
        self.reentrant = self.stage == 3
        self.mesh = init_device_mesh("cpu", (self.topology.world_size,))  # for DTensors of checkpoints

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        """Return the engine. DeepSpeed replaces the parameters of `optimizer` by flat FP32 partitions."""
        deepspeed = import_deepspeed()
        with redirect_stdout(io.StringIO()):  # DeepSpeed prints memory reports at every log level
            self.engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                config=copy.deepcopy(self.settings),
                dist_init_required=False,
            )
        return self.engine

    def accumulating(self, model: nn.Module, *, first: bool, last: bool) -> AbstractContextManager:
        # DeepSpeed would count micro-batches, but the last step of an epoch may have fewer.
        self.engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, model: nn.Module, loss: Tensor) -> None:
        # The engine ignores `scale_wrt_gas` for a loss that is its own output, so pass a copy.
        self.engine.backward(loss.clone(), scale_wrt_gas=False)

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, usable: Tensor, max_norm: float
    ) -> StepOutcome:
        """Step as in the base class. DeepSpeed reports a non-finite gradient norm as infinite."""
        assert max_norm == self.settings["gradient_clipping"]
        if self.max((~usable).float().to(self.device)).item():
            self.discard(model, optimizer)
            return StepOutcome(torch.full((), float("nan"), device=self.device), usable.new_zeros(()))
        self.engine.step()
        norm = torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32, device=self.device)
        applied: bool = self.engine.was_step_applied()
        if not applied:  # DeepSpeed leaves gradients that are offloaded in BF16
            self.discard(model, optimizer)
        return StepOutcome(norm, torch.tensor(applied, device=self.device))

    def discard(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        zero = self.engine.optimizer
        if self.stage == 3:
            zero._overflow_clean_up(1.0)
            return
        zero.zero_grad(set_to_none=True)
        if hasattr(zero, "bf16_groups"):  # BF16_Optimizer, which DeepSpeed uses for stage 1 with accumulation
            return
        zero.micro_step_id = -1
        for gradients in (zero.averaged_gradients, zero.all_grad_tensors):
            gradients.update(dict.fromkeys(gradients))  # in place: parameters refer to averaged_gradients
        if zero.cpu_offload:
            zero.reset_cpu_buffers()

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        if self.stage != 3:
            return super().gather(tensors)
        import deepspeed

        with deepspeed.zero.GatheredParameters(tensors):
            return [tensor.detach().clone() for tensor in tensors]

    # Checkpoints

    @torch.no_grad()
    def state(self) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Return this rank's rows of weights and moments by name, and a function that writes them back.

        The tensors are copies on the CPU, sharded along dim 0 as by FSDP2. The function also updates the
        model's parameters. Both are collective and gather one parameter at a time.
        """
        module = self.engine.module
        tensors: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            master = self._rows(parameter, None)
            if parameter.dtype == torch.float32:
                tensors[f"model/{name}"] = master
            else:
                halves = adamw.split_master(master.to_local())
                weight, remainder = (self._distributed(half, master.shape) for half in halves)
                tensors |= {f"model/{name}": weight, f"optimizer/{name}.master_param": remainder}
            for key in moments.MOMENTS:
                tensors[f"optimizer/{name}.{key}"] = self._rows(parameter, key)

        @torch.no_grad()
        def write_back() -> None:
            for name, parameter in module.named_parameters():
                rows = tensors[f"model/{name}"].to_local()
                if parameter.dtype != torch.float32:
                    remainder = tensors[f"optimizer/{name}.master_param"].to_local()
                    rows = adamw.merge_master(rows, remainder)
                self._set_rows(parameter, None, rows)
                for key in moments.MOMENTS:
                    self._set_rows(parameter, key, tensors[f"optimizer/{name}.{key}"].to_local())
            self._update_parameters()

        return tensors, write_back

    def _fragment(self, parameter: nn.Parameter, key: str | None) -> tuple[int, Tensor] | None:
        """Return this rank's part of a parameter's master weights (`key` None) or of a moment; None without.

        It is the index of the first value in the flattened parameter, and a view [size] of ZeRO's flat FP32
        partition, which holds fragments of many parameters.
        """
        zero = self.engine.optimizer
        if self.stage == 3:
            group, offset, size = zero.grad_position[zero.get_param_id(parameter)]
            start = size * self.topology.rank
            size = min(size, parameter.ds_numel - start)  # without the padding of the last ranks
            if size <= 0:
                return None
            flat = zero.fp32_partitioned_groups_flat[group]
        elif (mapping := parameter._hp_mapping) is None:
            return None
        else:
            (flat,) = zero.optimizer.param_groups[mapping.param_group_index]["params"]
            offset, address = mapping.hp_fragment_address.start, mapping.lp_fragment_address
            start, size = address.start, address.numel
        source = flat if key is None else optim.state_of(zero.optimizer, flat)[key]
        return start, source.detach().narrow(0, offset, size)

    def _rows(self, parameter: nn.Parameter, key: str | None) -> DTensor:
        """Return this rank's rows of the master weights or of a moment, on the CPU. Collective."""
        shape = _shape(parameter)
        full = self._assemble(shape.numel(), self._fragment(parameter, key)).view(shape)
        start, stop = self._row_range(shape)
        return self._distributed((full[start:stop] if shape else full).cpu(), shape)

    def _set_rows(self, parameter: nn.Parameter, key: str | None, rows: Tensor) -> None:
        """Write the rows of all ranks to the master weights or to a moment. Collective."""
        shape = _shape(parameter)
        start = self._row_range(shape)[0] * shape[1:].numel()
        has_piece = shape or self.topology.rank == 0  # every rank has a whole scalar
        piece = (start, rows.flatten()) if has_piece else None
        full = self._assemble(shape.numel(), piece)
        if fragment := self._fragment(parameter, key):
            start, values = fragment
            values.copy_(full.narrow(0, start, len(values)))

    def _row_range(self, shape: torch.Size) -> tuple[int, int]:
        """Return this rank's range of dim 0, split as by torch.chunk. It may be empty."""
        if not shape:
            return 0, 1
        size = -(-shape[0] // self.topology.world_size)
        rank = self.topology.rank
        return min(size * rank, shape[0]), min(size * (rank + 1), shape[0])

    def _assemble(self, numel: int, piece: tuple[int, Tensor] | None) -> Tensor:
        """Return a flat FP32 tensor from the disjoint pieces of all ranks: (first index, FP32 values)."""
        bits = torch.zeros(numel, dtype=torch.int32, device=self.device)
        if piece is not None:
            start, values = piece
            bits[start : start + values.numel()] = values.contiguous().view(torch.int32).to(self.device)
        # Integer sums keep every bit. An FP32 sum would turn -0.0 into 0.0.
        if self.topology.world_size > 1:
            dist.all_reduce(bits)
        return bits.view(torch.float32)

    def _distributed(self, local: Tensor, shape: torch.Size) -> DTensor:
        stride = torch.empty(shape, device="meta").stride()
        placement = Shard(0) if shape else Replicate()
        return DTensor.from_local(
            local.contiguous(), self.mesh, [placement], run_check=False, shape=shape, stride=stride
        )

    def _update_parameters(self) -> None:
        """Round the master weights to the model's parameters, on every rank."""
        zero = self.engine.optimizer
        if self.stage != 3:
            zero.update_lp_params()
            return
        zero._partition_all_parameters()  # small parameters stay gathered between steps, with old values
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)


def _shape(parameter: nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)
