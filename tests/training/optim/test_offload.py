"""Optimizer state in host memory: the same bits as on the device, in any order that the streams permit."""

import random
from collections import deque
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from fp8_suite.core.errors import UserError
from fp8_suite.training.optim import adamw, moments, offload
from fp8_suite.training.optim import optimizer as optim
from fp8_suite.training.optim.adamw import MasterAdamW
from fp8_suite.training.optim.offload import HostState
from fp8_suite.training.optim.pinned import PageLocker, PinnedMemory
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.parallel.jobs import same_bits

FORMATS = [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp8", "fp8"), ("fp8", "fp16")]


def build(formats=("fp8", "fp8"), dtype=torch.bfloat16, *, offloaded: bool):
    """Return matrices with and without blocks, vectors, an empty parameter, and their optimizer."""
    torch.manual_seed(0)
    shapes = {"blocks": (37, 128), "odd": (9, 100), "experts": (3, 5, 64), "vector": (777,), "empty": (0, 64)}
    model = torch.nn.ParameterDict({name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()})
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "moment_dtypes": formats}
    groups = [{"params": list(model.values())}]
    return model, MasterAdamW(groups, **settings, master_weights=True, offload=offloaded)


def train(model, optimizer, steps: range, *, skipped: int = 2) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optim.step_if(optimizer, apply=torch.tensor(step != skipped), scale=torch.tensor(0.5))


def values(model, optimizer) -> dict[str, torch.Tensor]:
    return {**model.state_dict(), **optim.optimizer_state(optimizer, model)}


@pytest.mark.parametrize("chunk", [3 * moments.BLOCK, offload.CHUNK])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("formats", FORMATS, ids=",".join)
def test_weights_and_state_are_the_same_bits_in_host_memory(formats, dtype, chunk, monkeypatch):
    monkeypatch.setattr(offload, "CHUNK", chunk)
    runs = [build(formats, dtype, offloaded=offloaded) for offloaded in (False, True)]
    for run in runs:
        train(*run, range(5))
    on_device, on_host = (values(*run) for run in runs)
    assert same_bits(on_device, on_host) and optim.optimizer_steps(runs[1][1]) == 4
    assert any(name.endswith(moments.EXPONENTS) for name in on_device) == bool({"fp8", "fp16"} & {*formats})


@pytest.mark.parametrize(("chunk", "offloaded"), [(3 * moments.BLOCK, True), (0, False)])
def test_fp8_parameters_are_quantized_from_the_weights_of_a_run_without(chunk, offloaded, monkeypatch):
    """TE's FP8 tensors need a GPU: here a parameter takes the values of E4M3."""
    monkeypatch.setattr(offload, "CHUNK", chunk)
    plain, fp8 = build(offloaded=False), build(offloaded=offloaded)
    model, optimizer = fp8
    matrices = [name for name, parameter in model.items() if parameter.ndim > 1]

    def quantize_(parameter, weight):
        parameter.data.copy_(weight.to(torch.float8_e4m3fn))

    for name in matrices:
        model[name].quantize_ = partial(quantize_, model[name])
    optim.set_weights(optimizer, model, {name: plain[0][name].detach() for name in matrices})
    for run in (plain, fp8):
        train(*run, range(5))
    assert same_bits(optim.optimizer_state(plain[1], plain[0]), optim.optimizer_state(optimizer, model))
    for name, parameter in plain[0].items():
        weight = parameter.detach()
        assert torch.equal(optim.weight_of(optimizer, model[name]), weight), name
        values = weight.to(torch.float8_e4m3fn).bfloat16() if name in matrices else weight
        assert torch.equal(model[name].detach(), values), name


class Streams:
    """Streams and events with the semantics of CUDA's. Work runs later, in a random permitted order."""

    def __init__(self):
        self.queues, self.done = [], set()
        self.default = self.current = self.Stream()
        self.module = SimpleNamespace(
            Stream=self.Stream,
            Event=self.Event,
            stream=self.use,
            current_stream=lambda: self.current,
            synchronize=lambda: None,
        )

    def Stream(self):
        queue = deque()
        self.queues.append(queue)

        def wait_event(event):
            queue.append(("wait", event.recorded))

        def wait_stream(stream):
            event = self.Event()
            event.record(stream)
            wait_event(event)

        return SimpleNamespace(queue=queue, wait_event=wait_event, wait_stream=wait_stream)

    def Event(self):
        event = SimpleNamespace(recorded=None)

        def record(stream):
            event.recorded = object()
            stream.queue.append(("record", event.recorded))

        event.record = record
        return event

    @contextmanager
    def use(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def enqueue(self, work) -> None:
        self.current.queue.append(("work", work))

    def run(self, seed: int) -> None:
        choose = random.Random(seed)
        while waiting := [queue for queue in self.queues if queue]:
            ready = [q for q in waiting if q[0][0] != "wait" or q[0][1] is None or q[0][1] in self.done]
            kind, what = choose.choice(ready).popleft()
            if kind == "work":
                what()
            elif kind == "record":
                self.done.add(what)


class LaterCopies(TorchDispatchMode):
    """Enqueue copies on the current stream, as non-blocking copies of pinned memory are."""

    def __init__(self, streams: Streams):
        super().__init__()
        self.streams = streams

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is not torch.ops.aten.copy_.default:
            return function(*args, **(kwargs or {}))
        self.streams.enqueue(lambda: function(*args, **(kwargs or {})))
        return args[0]


@pytest.mark.parametrize(("names", "chunk"), [(None, 2 * moments.BLOCK), (["blocks"], offload.CHUNK)])
@pytest.mark.parametrize("seed", range(6))
def test_any_order_that_the_events_permit_gives_the_same_bits(names, chunk, seed, monkeypatch):
    """With many chunks and with a single one."""
    monkeypatch.setattr(offload, "CHUNK", chunk)
    expected, run = build(offloaded=False), build(offloaded=True)
    train(*expected, range(1))
    train(*run, range(1))
    streams = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams.module)
    host = HostState(torch.device("cpu"))
    host.buffer_bytes = run[1].host.buffer_bytes
    seed_of_noise, scalars = torch.tensor(17), torch.tensor([1.0, 1.0, 0.1, 0.05])
    group = run[1].param_groups[0]

    def later(*args):
        streams.enqueue(lambda: adamw.update_(*args))

    with torch.no_grad():
        for _ in range(2):  # the second step reads what the first one wrote
            with LaterCopies(streams), host.streaming(later) as update:
                for parameter in (run[0][name] for name in names or run[0]):
                    update(parameter, parameter.grad, run[1].state[parameter], scalars, seed_of_noise, group)
            for parameter in (expected[0][name] for name in names or run[0]):
                state = expected[1].state[parameter]
                adamw.update_(parameter, parameter.grad, state, scalars, seed_of_noise, group)
        streams.run(seed)
    assert same_bits(values(*expected), values(*run))


@pytest.mark.parametrize("fails", ["allocating", "page-locking"])
def test_memory_that_the_host_cannot_give_is_refused(fails, monkeypatch):
    """CUDA refuses in the background, after the state has been allocated."""
    model, optimizer = build(offloaded=True)
    optimizer.host.locker = PageLocker(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    if fails == "allocating":
        monkeypatch.setattr(offload, "PinnedMemory", lambda nbytes: PinnedMemory(2**50))
    with pytest.raises(UserError) as refused:
        train(model, optimizer, range(1))
    assert refused.value.flags == {"offload_optimizer"}
    optimizer.host.locker._pool.shutdown()  # or a thread locks memory with the next test's stand-in for CUDA
