"""Ranks of a job as a grid of parallel axes.

`ranks` and `watchdog` know only processes. All other code asks the topology for the ranks of its purpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch.distributed as dist
from fp8_suite.data.context import Context
from fp8_suite.training.parallel import ranks
from fp8_suite.training.parallel.settings import MODES, ShardingConfig
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

GRID_AXES = ("pp", "replicate", "shard", "cp", "tp")  # the last one varies fastest with the rank


@dataclass(frozen=True)
class Topology:
    """Sizes of the axes, and this rank's number.

    - Rows of data: ranks that differ in `replicate` or `shard` read different rows, all others the same.
    - Sums of losses, counts and gradients, and maxima of FP8 scaling: over `replicate`, `shard` and `cp`.
      Ranks of `tp` have the same losses and counts, and maxima over all ranks are those of whole tensors.
    - Gradients of weights that all ranks of `tp` hold, such as norms: also over `tp`.
    - Layers of a model: `pp` ranks have different ones.
    - Weights under FSDP: sharded over `shard` and `cp` as one axis, copied over `replicate`.
    """

    rank: int = 0
    nodes: int = 1
    pp: int = 1
    replicate: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1
    context_group: ProcessGroup | None = None  # context parallelism; None for one rank
    tensor_group: ProcessGroup | None = None  # tensor parallelism; None for one rank
    sum_group: ProcessGroup | None = None  # ranks that hold the same parts of layers; None: all ranks
    # Only in a pipeline:
    stage_group: ProcessGroup | None = None  # ranks with the same layers
    pipeline_group: ProcessGroup | None = None  # ranks with the other layers, which read the same rows
    ends_group: ProcessGroup | None = None  # first and last rank of `pipeline_group`; None on the others

    @property
    def world_size(self) -> int:
        return prod(getattr(self, axis) for axis in GRID_AXES)

    @property
    def stage_size(self) -> int:
        """Number of ranks with the same layers."""
        return self.world_size // self.pp

    @property
    def pipeline_rank(self) -> int:
        """Number of this rank in its pipeline."""
        return self.rank // self.stage_size

    @property
    def data_size(self) -> int:
        """Number of ranks that read different rows."""
        return self.replicate * self.shard

    @property
    def data_rank(self) -> int:
        """Number of this rank among those that read different rows."""
        return self.rank // (self.cp * self.tp) % self.data_size

    @property
    def context(self) -> Context:
        """This rank's part of each sequence."""
        return Context(self.cp, self.rank // self.tp % self.cp)

    @property
    def sum_size(self) -> int:
        """Number of ranks over which losses, counts and gradients are summed."""
        return self.data_size * self.cp

    def fsdp_mesh(self, device_type: str) -> DeviceMesh:
        """Return the mesh of FSDP2: `shard`, before it `replicate` if there are copies. Collective."""
        sizes = {"pp": self.pp, "replicate": self.replicate, "shard": self.shard * self.cp, "tp": self.tp}
        sizes = {axis: size for axis, size in sizes.items() if size > 1 or axis == "shard"}
        mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return mesh[tuple(axis for axis in sizes if axis in ("replicate", "shard"))]


def build_topology(cfg: ShardingConfig, mode: str) -> Topology:
    """Arrange all ranks for a sharding mode. Collective. UserError if the sizes do not fit."""
    spec, cp, tp = MODES[mode], cfg.context_parallel_size, cfg.tensor_parallel_size
    pp, world_size = cfg.pipeline_parallel_size, ranks.world_size()
    copies = world_size // (pp * tp)  # ranks that hold the same weights
    shards = cp if spec.engine in ("none", "ddp") else copies
    if spec.in_groups:
        local_size = max(1, ranks.local_rank_and_size()[1] // tp)
        shards = ranks.run_on_rank0(lambda: cfg.shard_size(copies, local_size))
    sizes = dict(zip(GRID_AXES, (pp, copies // shards, shards // cp, cp, tp), strict=True))
    grid = np.arange(world_size).reshape(*sizes.values())

    def group(*axes: str, members: Any = slice(None)) -> ProcessGroup | None:
        """Return the group of the ranks that differ from this one in `axes` only; None if it is in none."""
        last = [GRID_AXES.index(axis) for axis in axes]
        rows = np.moveaxis(grid, last, range(-len(last), 0)).reshape(-1, prod(sizes[axis] for axis in axes))
        lists = rows[:, members].tolist()
        return dist.new_subgroups_by_enumeration(lists, timeout=ranks.COLLECTIVE_TIMEOUT)[0]

    pipeline_group = group("pp") if pp > 1 else None
    return Topology(
        rank=ranks.rank(),
        nodes=ranks.num_nodes(),
        **sizes,
        context_group=group("cp") if cp > 1 else None,
        tensor_group=group("tp") if tp > 1 else None,
        sum_group=group("replicate", "shard", "cp") if tp > 1 else None,
        stage_group=group("replicate", "shard", "cp", "tp") if pp > 1 else None,
        pipeline_group=pipeline_group,
        ends_group=group("pp", members=[0, -1]) if pp > 2 else pipeline_group,
    )
