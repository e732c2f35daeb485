"""DeepSpeed ZeRO against plain torch AdamW: equal steps, shared checkpoints, and DeepSpeed's settings."""

import importlib
import importlib.util
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fp8_suite.core.errors import UserError
from fp8_suite.core.packages import ROOT
from fp8_suite.te_models.kernels.loss import IGNORE, TokenLoss, linear_cross_entropy
from fp8_suite.training.checkpoint.state import weights_and_optimizer
from fp8_suite.training.checkpoint.store import Checkpoints
from fp8_suite.training.config import Config, config_from_dict
from fp8_suite.training.optim import adamw
from fp8_suite.training.optim import optimizer as optim
from fp8_suite.training.optim.adamw import local
from fp8_suite.training.optim.settings import OptimConfig
from fp8_suite.training.parallel.settings import ShardingConfig
from fp8_suite.training.parallel.zero import Zero
from fp8_suite.training.parallel.zero_settings import CONFIGS, merge_settings
from torch import Tensor, nn

from tests import children

installed = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not installed, reason="deepspeed is not installed")

torch.set_num_threads(1)
children.preload(__name__)
if installed and sys.argv[0] == "-c":  # in the server that ranks are forked from: it takes seconds to import
    os.environ["DS_ACCELERATOR"] = "cpu"
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MODES = tuple(CONFIGS)
MAX_NORM = 0.5  # all steps are clipped
MICRO_BATCHES = (2, 2, 1)  # of each rank, by step; an epoch's last step may have fewer
RANKS = 2
ZERO = "zero_optimization"
CFG = Config(optim=OptimConfig(batch_size=4, gradient_accumulation_steps=3, max_grad_norm=0.5))


class Tiny(nn.Module):
    """The awkward parts of real models: a tied head read from outside, FP32 tables, odd shapes."""

    def __init__(self, dtype: torch.dtype, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(13, 6)
        self.norm = nn.LayerNorm(6)
        self.inner = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 6))
        self.gate = nn.Linear(6, 1)  # one row: the second rank's share of it is empty
        self.lm_head = nn.Linear(6, 13, bias=False)
        self.to(dtype)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("rope", torch.linspace(0.1, 1.3, 5)[:, None], persistent=False)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 6))

    def forward(self, ids: Tensor, labels: Tensor) -> TokenLoss:
        hidden = self.embed(ids)  # [B, 5, 6]
        hidden = (hidden.float() * self.rope.cos() * self.table).to(hidden.dtype)
        hidden = hidden + self.inner(self.norm(hidden)) * self.gate(hidden)
        return linear_cross_entropy(hidden.flatten(0, 1), self.lm_head.weight, labels.flatten())


def micro_batches(step: int, ranks: list[int]) -> list[tuple[Tensor, Tensor]]:
    batches = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(100 * step + rank)
        for micro in range(MICRO_BATCHES[step % len(MICRO_BATCHES)]):
            ids, labels = torch.randint(0, 13, (2, 3, 5), generator=generator)
            labels.view(-1)[: 2 + 3 * rank + 7 * micro] = IGNORE  # uneven over ranks and micro-batches
            batches.append((ids, labels))
    return batches


def label_tokens(step: int) -> int:
    return sum(int((labels != IGNORE).sum()) for _, labels in micro_batches(step, list(range(RANKS))))


def build_adamw(model: nn.Module, masters: dict[str, Tensor] | None = None) -> torch.optim.AdamW:
    parameters = masters or dict(model.named_parameters())
    groups = [
        {"params": [p for p in parameters.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), fused=True)


class Plain:
    """The reference: one process, torch AdamW on FP32 weights, gradients summed in FP32."""

    def __init__(self, dtype: torch.dtype):
        self.model = Tiny(dtype)
        parameters = self.model.named_parameters()
        self.masters = {name: nn.Parameter(p.detach().float().clone()) for name, p in parameters}
        self.optimizer = build_adamw(self.model, self.masters)

    def step(self, step: int) -> tuple[float, float]:
        total, tokens = 0.0, label_tokens(step)
        for ids, labels in micro_batches(step, list(range(RANKS))):
            loss = self.model(ids, labels).loss / tokens
            loss.backward()
            total += loss.item()
            for name, parameter in self.model.named_parameters():
                master = self.masters[name]
                master.grad = parameter.grad.float() + (0 if master.grad is None else master.grad)
                parameter.grad = None
        norm = nn.utils.clip_grad_norm_(self.masters.values(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.publish()
        return total, norm.item()

    @torch.no_grad()
    def publish(self) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self.masters[name])

    def state(self) -> dict[str, Tensor]:
        """Tensors of a checkpoint, independent of `weights_and_optimizer`."""
        tensors = {"model/table": self.model.table}
        for name, master in self.masters.items():
            tensors[f"model/{name}"] = master.detach().clone()
            if self.model.embed.weight.dtype == torch.bfloat16:
                weight, remainder = adamw.split_master(master.detach())
                tensors |= {f"model/{name}": weight, f"optimizer/{name}.master_param": remainder}
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[f"optimizer/{name}.{key}"] = self.optimizer.state[master][key]
        return tensors


class Run:
    """The same training under a ZeRO mode, on every rank."""

    def __init__(self, mode: str, dtype: str, seed: int = 0):
        mode, _, offload = mode.partition("+")
        sharding = {"sharding_mode": mode, "batch_size": 3, "gradient_accumulation_steps": 2}
        cfg = config_from_dict(sharding | {"mixed_precision": dtype, "max_grad_norm": MAX_NORM})
        self.cfg, self.zero = cfg, Zero(mode, torch.device("cpu"), cfg)
        settings = self.zero.settings["zero_optimization"]
        # Several buckets and subgroups, one parameter over a bucket's size, some that stay whole.
        settings |= {"reduce_bucket_size": 40, "allgather_bucket_size": 40}
        if mode == "ds_zero3":
            settings["memory_efficient_linear"] = False  # its sums round more often
        if offload:
            settings["offload_optimizer"] = {"device": "cpu"}
        if self.zero.stage == 3:
            settings |= {"stage3_param_persistence_threshold": 7, "sub_group_size": 20}
        self.model = Tiny(DTYPES[dtype], seed)
        self.optimizer = build_adamw(self.model)
        self.engine = self.zero.wrap(self.model, self.optimizer)
        world = self.zero.topology.world_size
        self.ranks = [self.zero.topology.rank] if world == RANKS else list(range(RANKS))

    def backward(self, step: int, spoil: float = 1.0, *, finish: bool = True) -> float:
        total, batches = 0.0, micro_batches(step, self.ranks)
        for i, (ids, labels) in enumerate(batches):
            ends = {"first": i == 0, "last": finish and i == len(batches) - 1}
            with self.zero.accumulating(self.engine, **ends):
                out = self.engine(ids=ids, labels=labels)
                assert isinstance(out, TokenLoss)
                loss = out.loss * (spoil / label_tokens(step))
                self.zero.backward(self.engine, loss * self.zero.topology.world_size)
            total += loss.item()
        return self.zero.sum(torch.tensor(total)).item()

    def step(self, step: int, *, spoil: float = 1.0, usable: bool = True):
        loss, options = self.backward(step, spoil), {"usable": torch.tensor(usable), "max_norm": MAX_NORM}
        return loss, self.zero.step(self.engine, self.optimizer, **options)

    @torch.no_grad()
    def evaluate(self) -> None:
        self.engine.eval()
        for ids, labels in micro_batches(77, self.ranks):
            self.engine(ids=ids, labels=labels)
        self.engine.train()

    def state(self) -> dict[str, Tensor]:
        return self.tensors()[0]

    def tensors(self):
        return weights_and_optimizer(self.model, self.optimizer, self.zero, self.cfg)

    def weights(self) -> list[Tensor]:
        return self.zero.gather(list(self.model.parameters()))

    def load(self, checkpoints: Checkpoints, path: Path) -> dict[str, Tensor]:
        tensors, put_back = self.tensors()
        checkpoints.load(path, tensors)
        put_back()
        optim.set_optimizer_steps(self.optimizer, checkpoints.read_meta(path)["steps"])
        return tensors

    def save(self, checkpoints: Checkpoints, step: int) -> Path:
        return checkpoints.save(step, self.state(), {"steps": optim.optimizer_steps(self.optimizer)})


def bits(tensor: Tensor) -> Tensor:
    return local(tensor).detach().contiguous().flatten().view(torch.uint8)


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    differ = [key for key in first if not torch.equal(bits(first[key]), bits(second[key]))]
    assert not differ


def quietly(rank: int, folder: Path, work, arguments: tuple) -> None:
    """Run `work(folder, *arguments)`; it must not print, or change the launcher's environment and signals."""
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1"}
    os.dup2(os.open(folder / f"printed.{rank}", os.O_CREAT | os.O_WRONLY), 1)
    work(folder, *arguments)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("elsewhere", "1")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    sys.stdout.flush()


def run_ranks(work, folder: Path, *arguments, world_size: int = RANKS) -> None:
    children.run_ranks(quietly, folder, work, arguments, world_size=world_size)
    printed = "".join(path.read_text() for path in folder.glob("printed.*"))
    assert not printed, f"DeepSpeed printed: {printed}"


def tolerance_of(mode: str, dtype: str) -> float:
    return 1e-2 if dtype == "bf16" and mode == "ds_zero3_offload" else 1e-5


def train_all(folder: Path, mode: str) -> None:
    for dtype in DTYPES:
        (folder / dtype).mkdir(exist_ok=True)
        train(folder / dtype, mode, dtype)
    backward_from_the_output(mode)


def gradients_held(run: Run) -> list:
    """Return gradients that parameters still refer to in DeepSpeed; BF16_Optimizer keeps them on purpose."""
    if run.zero.stage < 3 and hasattr(run.engine.optimizer, "bf16_groups"):
        return []
    mappings = (getattr(p, "_hp_mapping", None) for p in run.model.parameters())
    groups = [m.gradient_dict.values() for m in mappings if m is not None and m.gradient_dict]
    return [gradients for group in groups for gradients in group if gradients is not None]


def train(folder: Path, mode: str, dtype: str) -> None:
    """Run undisturbed, with every disturbance in between, and resumed: all end in the same bits."""
    run = Run(mode, dtype)
    assert run.model.rope.dtype == run.model.table.dtype == torch.float32
    assert torch.equal(run.model.rope, Tiny(DTYPES[dtype]).rope)
    assert run.model.lm_head.weight is run.model.embed.weight
    folder.mkdir(exist_ok=True)
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=9)
    log = []
    for step in range(3):
        loss, outcome = run.step(step)
        assert outcome.applied and outcome.grad_norm.dtype == torch.float32 and outcome.grad_norm.ndim == 0
        log.append((loss, outcome.grad_norm.item()))
        if step == 1:
            saved = run.save(checkpoints, 2)
    end, weights = run.state(), run.weights()
    run.save(checkpoints, 3)
    for (name, like), weight in zip(Tiny(DTYPES[dtype]).named_parameters(), weights, strict=True):
        assert (weight.dtype, weight.shape) == (like.dtype, like.shape)
        master = local(end[f"model/{name}"])
        if dtype == "bf16":
            master = adamw.merge_master(master, local(end[f"optimizer/{name}.master_param"]))
        rows = -(-len(weight) // RANKS)
        assert torch.equal(weight[rows * run.zero.topology.rank :][:rows], master.to(weight.dtype))
    if run.zero.topology.rank == 0:
        (folder / "log.json").write_text(json.dumps(log))

    run = Run(mode, dtype)
    before = run.state()
    run.evaluate()
    for finish in (True, True, False):
        run.backward(4, finish=finish)
        run.zero.discard(run.engine, run.optimizer)
        assert not gradients_held(run)
    same(run.state(), before)
    assert optim.optimizer_steps(run.optimizer) == 0
    for step in range(3):
        loss, outcome = run.step(step)
        assert outcome.applied and [loss, outcome.grad_norm.item()] == list(log[step])
        before, weights_before = run.state(), run.weights()
        for spoil in (float("nan"), float("inf")):  # of one rank
            _, outcome = run.step(7, spoil=spoil if run.zero.topology.rank == 1 else 1.0)
            assert not outcome.applied and not outcome.grad_norm.isfinite()
        _, outcome = run.step(8, usable=run.zero.topology.rank != 1)
        assert not outcome.applied
        run.evaluate()
        run.backward(5)
        run.zero.discard(run.engine, run.optimizer)
        same(run.state(), before)
        assert all(torch.equal(a, b) for a, b in zip(run.weights(), weights_before, strict=True))
        assert optim.optimizer_steps(run.optimizer) == step + 1
    same(run.state(), end)

    run = Run(mode, dtype, seed=1)
    run.step(9)
    run.load(checkpoints, saved)
    loss, outcome = run.step(2)
    assert [loss, outcome.grad_norm.item()] == list(log[2])
    same(run.state(), end)
    assert all(torch.equal(a, b) for a, b in zip(run.weights(), weights, strict=True))


def backward_from_the_output(mode: str) -> None:
    """A loss that is the engine's own output, as in calibration, is scaled as any other."""
    norms = []
    for factor in (None, 1.0):
        run = Run(mode, "bf16")
        batches = micro_batches(3, run.ranks)
        for i, (ids, labels) in enumerate(batches):
            with run.zero.accumulating(run.engine, first=i == 0, last=i == len(batches) - 1):
                loss = run.engine(ids=ids, labels=labels).loss
                run.zero.backward(run.engine, loss * factor if factor else loss)
        usable = torch.tensor(True)
        outcome = run.zero.step(run.engine, run.optimizer, usable=usable, max_norm=MAX_NORM)
        norms.append(outcome.grad_norm.item())
    assert len(batches) > 1 and norms[0] == norms[1], norms


@needs_deepspeed
@pytest.mark.parametrize("mode", [*MODES, "ds_zero2+offload"])
def test_zero_trains_as_plain_adamw_does(mode, tmp_path):
    run_ranks(train_all, tmp_path, mode)
    for dtype in DTYPES:
        tolerance = tolerance_of(mode, dtype)
        close = {"rtol": tolerance, "atol": tolerance / 10}
        plain = Plain(DTYPES[dtype])
        log = torch.tensor([plain.step(step) for step in range(3)])
        log_of_zero = torch.tensor(json.loads((tmp_path / dtype / "log.json").read_text()))
        torch.testing.assert_close(log_of_zero, log, rtol=tolerance, atol=0)
        weights = load_latest(tmp_path / dtype / "checkpoints", plain.state())
        for key, expected in plain.state().items():
            if not key.endswith("master_param"):
                torch.testing.assert_close(weights[key], expected, **close, msg=key)


def load_latest(folder: Path, like: dict[str, Tensor]) -> dict[str, Tensor]:
    checkpoints = Checkpoints(folder, keep_last=9)
    tensors = {key: torch.full_like(tensor, 7) for key, tensor in like.items()}
    checkpoints.load(checkpoints.latest(), tensors)
    return tensors


def carry(folder: Path, name: str, mode: str) -> None:
    """Load `name`, save it unchanged under another name, take a step, and save as `mode`."""
    for dtype in DTYPES:
        run, place = Run(mode, dtype, seed=3), folder / dtype
        checkpoints = Checkpoints(place / name, keep_last=9)
        loaded = run.load(checkpoints, checkpoints.latest())
        same(run.state(), loaded)
        run.save(Checkpoints(place / f"{mode}-loaded", keep_last=9), 1)
        steps = optim.optimizer_steps(run.optimizer)
        loss, outcome = run.step(steps)
        run.save(Checkpoints(place / mode, keep_last=9), steps + 1)
        if run.zero.topology.rank == 0:
            (place / f"{mode}.json").write_text(json.dumps([loss, outcome.grad_norm.item()]))


@needs_deepspeed
def test_a_checkpoint_resumes_in_another_mode_and_world(tmp_path):
    plain = {dtype: Plain(torch_dtype) for dtype, torch_dtype in DTYPES.items()}
    for dtype, run in plain.items():
        for step in range(2):
            run.step(step)
        next(iter(run.optimizer.state.values()))["exp_avg"][3, 2] = -0.0  # must come back as it is
        (tmp_path / dtype).mkdir()
        Checkpoints(tmp_path / dtype / "plain", keep_last=9).save(2, run.state(), {"steps": 2})
    here = "plain"
    for number, mode in enumerate(MODES):
        run_ranks(carry, tmp_path, here, mode, world_size=2 - number % 2)
        for dtype, run in plain.items():
            place, like = tmp_path / dtype, run.state()
            same(load_latest(place / f"{mode}-loaded", like), load_latest(place / here, like))
            expected = pytest.approx(run.step(2 + number), rel=tolerance_of(mode, dtype))
            assert json.loads((place / f"{mode}.json").read_text()) == expected
        here = mode


def merge(folder: Path, **settings):
    """Merge a file with these settings; the default stage is 2."""
    path = folder / "zero.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}} | settings))
    return merge_settings(str(path), CFG, 2)


@needs_deepspeed
@pytest.mark.parametrize("name", CONFIGS)
def test_the_file_of_a_mode_sets_how_to_shard_and_flags_the_rest(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = merge_settings(CONFIGS[name], CFG, 2)
    assert json.loads(Path(CONFIGS[name]).read_text()) == {ZERO: settings[ZERO]}
    assert settings["train_batch_size"] == 24 and settings["communication_data_type"] == "fp32"
    low = replace(CFG, sharding=ShardingConfig(grad_reduce_dtype="bf16"))
    assert merge_settings(CONFIGS[name], low, 2)["communication_data_type"] == "bf16"


@needs_deepspeed
def test_values_that_agree_with_the_flags_are_accepted(tmp_path):
    zero = {"stage": 3, "overlap_comm": True}
    agreeing = {"train_batch_size": "auto", "gradient_accumulation_steps": 3, "bf16": {"enabled": "auto"}}
    off = {"fp16": {"enabled": "auto", "loss_scale": 0}, "tensorboard": {"enabled": False}}
    more = {ZERO: zero | {"reduce_bucket_size": "auto"}, "wall_clock_breakdown": True}
    settings = merge(tmp_path, **agreeing, **off, **more)
    assert settings[ZERO] == zero and settings["wall_clock_breakdown"] and settings["bf16"]["enabled"]
    assert not settings.keys() & {"fp16", "tensorboard", "optimizer", "scheduler"}


@needs_deepspeed
@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"train_micro_batch_size_per_gpu": 8}, "train_micro_batch_size_per_gpu"),
        ({"bf16": {"enabled": False}}, "bf16"),
        ({"optimizer": {"type": "AdamW"}}, "optimizer"),
        ({"gradient_cliping": 1.0}, "gradient_clipping"),  # what was meant
        ({ZERO: None}, f"{ZERO}.stage"),
        ({ZERO: {"stage": "auto"}}, f"{ZERO}.stage"),
        ({ZERO: {"stage": 2, "overlap_com": True}}, f"{ZERO}.overlap_com"),
        ({ZERO: {"stage": 2, "compute_grad_norm": False}}, f"{ZERO}.compute_grad_norm"),
        ({ZERO: {"stage": 2, "offload_param": {"device": "cpu"}}}, f"{ZERO}.offload_param"),
        ({ZERO: {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, f"{ZERO}.offload_optimizer"),
    ],
)
def test_a_file_with_wrong_or_contradicting_settings_is_refused(settings, key, tmp_path):
    with pytest.raises(UserError) as refused:
        merge(tmp_path, **settings)
    assert refused.value.flags == {"deepspeed_config"} and key in str(refused.value)


def test_without_deepspeed_the_error_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(UserError, match=r"--sharding_mode.*pip install deepspeed=="):
        merge_settings(CONFIGS["ds_zero2"], CFG, 2)
