"""Plans of torch.distributed.checkpoint: which parts of tensors each rank writes and reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from fp8_suite.te_models.parallel.tensor_parallel import Region
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Regions = Callable[[str], Region | None]  # region of a tensor by its key, None if a rank has it whole
Place = tuple[MetadataIndex, slice]  # a shard, and rows of it


def tensor_spec(dtype: torch.dtype, shape: Iterable[int]) -> dict:
    """Return an entry of the manifest."""
    return {"dtype": str(dtype), "shape": list(shape)}


def _as_stored(tensor: Tensor) -> Tensor:
    # safetensors' torch reader does not know the E8M0 scales of MXFP8, so float8 is stored as uint8.
    float8 = tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point
    return tensor.view(torch.uint8) if float8 else tensor


def _chunks(region: Region, first: int, sizes: torch.Size) -> Iterator[tuple[ChunkStorageMetadata, slice]]:
    """Yield chunks of the whole tensor, and their rows in a shard that begins at row `first` of the part."""
    for rows, row in region.pieces(first, first + sizes[0]):
        offsets = torch.Size([row, region.first_column][: len(sizes)])
        shape = torch.Size([rows.stop - rows.start, *sizes[1:]])
        yield ChunkStorageMetadata(offsets, shape), slice(rows.start - first, rows.stop - first)


class SavePlanner(dcp.DefaultSavePlanner):
    """Plans who writes which shard; `specs` has shape and dtype of all tensors, on the coordinator."""

    def __init__(self, region: Regions):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.region = region
        self.places: dict[MetadataIndex, Place] = {}  # of the pieces of parts

    def create_local_plan(self) -> dcp.SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[piece for item in plan.items for piece in self._pieces(item)])
        return self.plan

    def _pieces(self, item: dcp.WriteItem) -> Iterator[dcp.WriteItem]:
        if (region := self.region(item.index.fqn)) is None:
            yield item
            return
        shard, properties = item.tensor_data.chunk, item.tensor_data.properties
        for chunk, rows in _chunks(region, shard.offsets[0], shard.sizes):
            index = MetadataIndex(item.index.fqn, chunk.offsets)
            self.places[index] = item.index, rows
            data = TensorWriteData(chunk, properties, region.shape)
            yield dcp.WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> Any:
        self.specs: dict[str, dict] = {}
        for item in (item for plan in all_plans for item in plan.items):
            key, data = item.index.fqn, item.tensor_data
            spec = tensor_spec(data.properties.dtype, data.size)
            same = self.specs.setdefault(key, spec) == spec
            assert same, f"tensor {key!r} is {self.specs[key]} on one rank and {spec} on another"
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index not in self.places:
            return super().lookup_object(index)
        shard, rows = self.places[index]
        return super().lookup_object(shard)[rows]

    def transform_object(self, write_item: Any, object: Any) -> Tensor:
        return _as_stored(object)


class LoadPlanner(dcp.DefaultLoadPlanner):
    """Plans who reads which shard."""

    def __init__(self, region: Regions):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.region = region
        self.places: dict[MetadataIndex, Tensor] = {}  # pieces of parts

    def create_local_plan(self) -> dcp.LoadPlan:
        parts = {key: region for key in self.state_dict if (region := self.region(key))}
        whole = {key: tensor for key, tensor in self.state_dict.items() if key not in parts}
        plan = create_default_local_load_plan(whole, self.metadata)
        for key, region in parts.items():
            shard, first = self.state_dict[key], 0
            if isinstance(shard, DTensor):
                mesh, placements = shard.device_mesh, shard.placements
                first = compute_local_shape_and_global_offset(shard.shape, mesh, placements)[1][0]
                shard = shard.to_local()
            chunks = []
            for chunk, rows in _chunks(region, first, shard.shape):
                self.places[MetadataIndex(key, chunk.offsets)] = shard[rows]
                chunks.append(chunk)
            metadata = self.metadata.state_dict_metadata[key]
            plan.items.extend(create_read_items_for_chunk_list(key, metadata, chunks))
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.places[index] if index in self.places else super().lookup_tensor(index)

    def transform_tensor(self, read_item: Any, tensor: Tensor) -> Tensor:
        return _as_stored(super().transform_tensor(read_item, tensor))
