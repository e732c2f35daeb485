"""Ranks of a job as a grid of parallel axes.

`ranks` and `watchdog` know only processes. All other code asks the topology for the ranks of its purpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch.distributed as dist
from fp8_suite.data.context import Context
from fp8_suite.training.parallel import ranks
from fp8_suite.training.parallel.settings import MODES, ShardingConfig
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("pp", "replicate", "shard", "cp", "tp")  # a rank's number counts through them, the last one fastest


@dataclass(frozen=True)
class Topology:
    """Sizes of the axes, and this rank's number.

    - Rows of data: ranks that differ in `replicate` or `shard` read different rows, all others the same.
    - Sums of losses, counts and gradients, and maxima of FP8 scaling: over `replicate`, `shard` and `cp`.
    - Weights under FSDP: sharded over `shard` and `cp` as one axis, copied over `replicate`.
    """

    rank: int = 0
    nodes: int = 1
    pp: int = 1
    replicate: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1
    context_group: ProcessGroup | None = None  # ranks that share this one's sequences, if there are several

    @property
    def world_size(self) -> int:
        return prod(getattr(self, axis) for axis in AXES)

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
        shards = self.shard * self.cp
        if self.replicate == 1:
            return init_device_mesh(device_type, (shards,), mesh_dim_names=("shard",))
        return init_device_mesh(device_type, (self.replicate, shards), mesh_dim_names=("replicate", "shard"))


def build_topology(cfg: ShardingConfig, mode: str) -> Topology:
    """Arrange all ranks for a sharding mode. Collective. UserError if the sizes do not fit."""
    world_size, spec, cp = ranks.world_size(), MODES[mode], cfg.context_parallel_size
    shards = cp if spec.engine in ("none", "ddp") else world_size
    if spec.in_groups:
        local_size = ranks.local_rank_and_size()[1]
        shards = ranks.run_on_rank0(lambda: cfg.shard_size(world_size, local_size))
    group = dist.new_subgroups(cp, timeout=ranks.COLLECTIVE_TIMEOUT)[0] if cp > 1 else None
    return Topology(
        rank=ranks.rank(),
        nodes=ranks.num_nodes(),
        replicate=world_size // shards,
        shard=shards // cp,
        cp=cp,
        context_group=group,
    )
