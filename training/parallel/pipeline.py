"""Pipeline parallelism: ranks hold different layers, and a step's micro-batches run through them in turn.

torch.distributed.pipelining has the schedules and sends activations and their gradients. All ranks of a
pipeline read the same rows. Between stages travel activations [T, D] for T tokens, the most of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fp8_suite.te_models.kernels.loss import TokenLoss
from fp8_suite.training.optim.accumulation import gradient_of
from fp8_suite.training.optim.adamw import local
from fp8_suite.training.parallel.fsdp import FSDP
from fp8_suite.training.parallel.strategies import StepOutcome, Strategy
from fp8_suite.training.parallel.topology import Topology
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

Inputs = dict[str, Any]  # of the model, see `data.collate.Batch`
Autocast = Callable[[], AbstractContextManager]


class _Pipelined(Strategy):
    """The part of a strategy that is the same in all sharding modes."""

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        super().wrap(model, optimizer)
        return Pipeline(model, self)

    def run_pipeline(
        self, model: Pipeline, micro_batches: list[Any], autocast: Autocast, factor: Tensor | float
    ) -> Tensor:
        """Run forward and backward of a step's micro-batches. Return the sum of their losses.

        Backward runs on each micro-batch's loss, summed over its label tokens, times `factor`.
        """
        self.before_step(model.model, len(micro_batches))
        if self.loss_scale:
            factor = factor * self.loss_scale.value
        loss_sum = model.train_on([batch.inputs for batch in micro_batches], autocast, factor)
        self.exchange_gradients(model.model)
        if model.model.tied and (ends := self.topology.ends_group):  # both hold a copy of the weight
            dist.all_reduce(local(gradient_of(model.model.embed_tokens.weight)), group=ends)
        return loss_sum

    def before_step(self, model: nn.Module, micro_batches: int) -> None:
        """Prepare the gradients of all micro-batches, of which there are `micro_batches`."""

    def before_last_backward(self, model: nn.Module, layers: range) -> None:
        """Prepare a stage's backward pass of a step's last micro-batch."""

    def exchange_gradients(self, model: nn.Module) -> None:
        """Average gradients over the ranks with the same layers, unless backward has done so."""

    def step(self, model: Pipeline, *args: Any, **kwargs: Any) -> StepOutcome:
        return super().step(model.model, *args, **kwargs)

    def count_parameters(self, model: nn.Module) -> int:
        count = torch.tensor(super().count_parameters(model), device=self.device)
        dist.all_reduce(count, group=self.topology.pipeline_group)
        return int(count)

    def counted(self, model: nn.Module) -> list[nn.Parameter]:
        copy = model.embed_tokens.weight if model.copies_embedding else None
        return [parameter for parameter in model.parameters() if parameter is not copy]

    def total_norm(self, norm: Tensor) -> Tensor:
        square = super().total_norm(norm).square()
        dist.all_reduce(square, group=self.topology.pipeline_group)
        return square.sqrt()


class PipelineDDP(_Pipelined):
    """Pipelines of a whole model each. Gradients are averaged after a step's last micro-batch."""

    def before_step(self, model: nn.Module, micro_batches: int) -> None:
        if self.gradient_sums:
            self.gradient_sums.begin_pipeline()

    def exchange_gradients(self, model: nn.Module) -> None:
        size, group = self.topology.sum_size, self.topology.sum_group or self.topology.stage_group
        if size > 1:
            gradients = [g for p in model.parameters() if (g := gradient_of(p)) is not None]
            torch._foreach_div_(gradients, size)
            for exchange in [dist.all_reduce(g, group=group, async_op=True) for g in gradients]:
                exchange.wait()


class PipelineFSDP(_Pipelined, FSDP):
    """Pipelines whose stages are sharded over the ranks with the same layers."""

    def before_step(self, model: nn.Module, micro_batches: int) -> None:
        is_single = micro_batches == 1  # in calibration, or in an epoch's last step
        self.gradient_sums.begin_micro_batch(first=is_single, last=is_single)
        self._reduce_gradients(model, False)
        for block in model.blocks:
            self._reduce_gradients(block, False)

    def before_last_backward(self, model: nn.Module, layers: range) -> None:
        if model.embeds == (layers.start == 0):  # a stage with what is not in layers, or on a rank without it
            self._reduce_gradients(model, True)
        for i in layers:
            self._reduce_gradients(model.layers[i], True)

    def _reduce_gradients(self, module: nn.Module, reduces: bool) -> None:
        module.set_requires_gradient_sync(reduces, recurse=False)
        if self.gathers_once:
            module.set_reshard_after_backward(reduces, recurse=False)


class Pipeline(nn.Module):
    """The stages of this rank, run together with the other ranks of its pipeline. Every call is collective.

    Called as the model is, for evaluation.
    """

    def __init__(self, model: nn.Module, strategy: _Pipelined):
        super().__init__()
        self.model, self.topology, self.device = model, strategy.topology, strategy.device
        self.stages = [Stage(model, layers, strategy.before_last_backward) for layers in model.stages]
        # Numbers of micro-batches and of tokens, and their schedule, by "has backward".
        self.schedules: dict[bool, tuple[tuple[int, int], Any]] = {}
        # Communicators of NCCL are created by a collective of all ranks.
        dist.all_reduce(torch.zeros((), device=self.device), group=self.topology.pipeline_group)

    def forward(self, **inputs: Any) -> TokenLoss:
        """Return loss and correct predictions of a micro-batch, without gradients, on every rank."""
        self._run([inputs], nullcontext, factor=None)
        return self._sums()

    def train_on(self, inputs: list[Inputs], autocast: Autocast, factor: Tensor | float) -> Tensor:
        """Run forward and backward of a step's micro-batches. Return the sum of losses on every rank."""
        # Interleaved micro-batches come in rounds of `pp`. An epoch's last step may have any number of them.
        rest = len(inputs) % self.topology.pp if len(self.stages) > 1 else 0
        for part in filter(None, (inputs[: len(inputs) - rest], inputs[len(inputs) - rest :])):
            self._run(part, autocast, factor, first=part[0] is inputs[0], last=part[-1] is inputs[-1])
        return self._sums().loss

    def _run(self, inputs: list[Inputs], autocast: Autocast, factor: Any, first=False, last=False) -> None:
        trains, tokens = factor is not None, max(arguments["input_ids"].numel() for arguments in inputs)
        tokens //= self.topology.tp
        built, schedule = self.schedules.get(trains, ((0, 0), None))
        size = len(inputs), max(tokens, built[1])  # buffers are for the longest micro-batch so far
        if built != size:
            schedule = self._build_schedule(*size, trains=trains)
            self.schedules[trains] = size, schedule
        for stage in self.stages:
            stage.begin(inputs, autocast, factor, tokens=size[1], first=first, last=last)
        # Each stage has its inputs. The loss function gets a part of `target` per micro-batch.
        schedule.step(target=torch.zeros(len(inputs)) if trains else None)
        self.model.first_micro_batch = None

    def _build_schedule(self, count: int, tokens: int, *, trains: bool) -> Any:
        topology, options = self.topology, self.model.options
        total = topology.pp * len(self.stages)
        shape, dtype = (tokens, self.model.config.hidden_size), options.compute_dtype or options.dtype
        hidden = torch.empty(shape, dtype=dtype, device="meta", requires_grad=trains)
        loss = torch.empty(1, device="meta", requires_grad=trains)
        stages = []
        for number, stage in zip(range(topology.pipeline_rank, total, topology.pp), self.stages, strict=True):
            received, sent = () if number == 0 else (hidden,), loss if number == total - 1 else hidden
            shapes = {"input_args": received, "output_args": (sent,), "group": topology.pipeline_group}
            stages.append(PipelineStage(stage, number, total, self.device, **shapes))
        name = "Interleaved1F1B" if len(stages) > 1 else "1F1B" if count >= total else "GPipe"
        loss_function = (lambda output, _: output.sum()) if trains else None
        part = stages if len(stages) > 1 else stages[0]
        return get_schedule_class(name)(part, count, loss_fn=loss_function, scale_grads=False)

    def _sums(self) -> TokenLoss:
        """Return the sums of the last stage on every rank, and start new ones."""
        results, self.stages[-1].results = self.stages[-1].results, []
        loss = sum((result.loss for result in results), torch.zeros((), device=self.device))
        correct = sum((result.correct for result in results), torch.zeros_like(loss, dtype=torch.int64))
        sums = torch.stack([loss.double(), correct.double()])
        dist.all_reduce(sums, group=self.topology.pipeline_group)
        return TokenLoss(sums[0].float(), sums[1].long())


class Stage(nn.Module):
    """Layers of one stage, as torch's schedules call them: micro-batch after micro-batch."""

    def __init__(
        self, model: nn.Module, layers: range, before_last_backward: Callable[[nn.Module, range], None]
    ):
        super().__init__()
        self.model, self.layers, self.before_last_backward = model, layers, before_last_backward
        self.results: list[TokenLoss] = []

    def begin(
        self, inputs: list[Inputs], autocast: Autocast, factor: Any, *, tokens: int, first: bool, last: bool
    ) -> None:
        """Set the inputs of the next calls, whose activations are sent as `tokens` rows.

        They begin a step if `first`, and end it if `last`. Without `factor` there is no backward.
        """
        self.inputs = enumerate(inputs, start=0 if first else 1)
        self.last_inputs = inputs[-1] if last else None
        self.autocast, self.factor, self.tokens = autocast, factor, tokens

    def forward(self, *received: Tensor) -> Tensor:
        """Map activations [T, D] of the stage before to this stage's, or, in the last, to the loss [1]."""
        number, inputs = next(self.inputs)
        size = inputs["labels"].numel() // (self.model.tensor.size if self.model.tensor else 1)
        if self.factor is not None:
            self.model.first_micro_batch = number == 0
        with self.autocast():
            result = self.model(**inputs, stage=self.layers, hidden=received[0][:size] if received else None)
        if isinstance(result, TokenLoss):
            self.results.append(TokenLoss(*(value.detach() for value in result)))
            # Not a view: the schedule detaches it in place, which frees its graph.
            output = torch.stack([result.loss * (1.0 if self.factor is None else self.factor)])
        else:
            output = F.pad(result, (0, 0, 0, self.tokens - size)) if size < self.tokens else result
        if inputs is self.last_inputs:
            output.register_hook(lambda _: self.before_last_backward(self.model, self.layers))
        return output


def tensors_of_all_stages(
    tensors: Iterator[tuple[str, Tensor]], topology: Topology, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors of all ranks of a pipeline, rank by rank and one at a time. Collective."""
    group = topology.pipeline_group
    for number in range(topology.pp):
        source = dist.get_global_rank(group, number)
        while True:
            item = next(tensors, None) if number == topology.pipeline_rank else None
            header = [item and (item[0], item[1].shape, item[1].dtype)]
            dist.broadcast_object_list(header, source, group=group, device=device)
            if header[0] is None:
                break
            name, shape, dtype = header[0]
            tensor = item[1].contiguous() if item else torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(tensor, source, group=group)
            yield name, tensor
