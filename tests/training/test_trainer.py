"""The training loop with a ten-line model: steps, skips, evaluation, rates, saves and stop signals."""

import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fp8_suite.core.errors import UserError
from fp8_suite.core.signals import Stopped, handling_stop_signals
from fp8_suite.data.collate import Batch
from fp8_suite.data.loader import LoaderState
from fp8_suite.te_models.kernels.loss import TokenLoss
from fp8_suite.te_models.shape import ModelShape, model_flops
from fp8_suite.training.checkpoint.progress import Progress, WallTime
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.estimate.sizes import with_sizes
from fp8_suite.training.optim.batch_ramp import BatchSchedule
from fp8_suite.training.optim.schedule import learning_rate
from fp8_suite.training.parallel.strategies import Strategy
from fp8_suite.training.precision.scaling import Scaling
from fp8_suite.training.step import Stack
from fp8_suite.training.tracking.meter import LONG_STEP, Meter
from fp8_suite.training.trainer import Hooks, Logs, Trainer
from torch import nn

SHAPE = ModelShape(8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, ffn_hidden_size=8, vocab_size=11)


class Bigram(nn.Module):
    """Predicts the next token from the current one; its loss is a sum over label tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 11)

    def forward(self, input_ids, labels):
        logits = self.table(input_ids)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return TokenLoss(loss, ((logits.argmax(-1) == labels) & (labels != -100)).sum())


def rows(count: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rows whose label counts differ widely, so that a mean of means is not the mean."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for i in range(count):
        ids = torch.randint(0, 11, (12,), generator=generator)
        labels = ids.roll(-1)
        labels[1 + (i * 5) % 11 :] = -100
        out.append((ids, labels))
    return out


def to_batch(part) -> Batch:
    ids, labels = (torch.stack(t) for t in zip(*part, strict=True))
    counted = int((labels != -100).sum())
    return Batch(
        {"input_ids": ids, "labels": labels}, counted, ids.numel(), ids.numel(), 0, [*range(len(ids))]
    )


class ListLoader:
    """Batches from a list, over and over; counts epochs as data.Loader does."""

    def __init__(self, batches):
        self.batches, self.state, self.done = batches, LoaderState(0, 0), 0
        self.micro_batches_per_epoch = len(batches)

    def __iter__(self):
        for batch in self.batches:
            self.done += 1
            yield batch
        self.state.epoch, self.done = self.state.epoch + 1, 0

    def micro_batches_left(self):
        return len(self.batches) - self.done

    def state_dict(self):
        return {"epoch": self.state.epoch, "done": self.done}

    def load_state_dict(self, state):
        self.state.epoch, self.done = state["epoch"], state["done"]


@dataclass
class Record:
    """Tracker and display in one."""

    lines: list = field(default_factory=list)
    messages: list = field(default_factory=list)

    def log(self, step, metrics):
        self.lines.append((step, metrics))

    def update(self, step, metrics):
        pass

    def message(self, text):
        self.messages.append(text)

    def series(self, name):
        return [metrics[name] for _, metrics in self.lines if name in metrics]


@dataclass
class Saver:
    """Saves nothing; remembers what it should have saved."""

    saved_step: int = -1
    restored_unevaluated: bool = False
    on_save: Callable = lambda: None
    events: list = field(default_factory=list)

    def save(self, step):
        self.saved_step = step
        self.events.append(step)
        self.on_save()

    def record_eval_loss(self, step, eval_loss):
        self.events.append(f"{step} evaluated")

    def reserve(self): ...
    def check(self): ...
    def finish(self): ...


def trainer(
    batches=None,
    *,
    total_steps,
    model=None,
    eval_batches=None,
    saver=None,
    scaling=None,
    progress=None,
    **settings,
):
    """A trainer, and what it logs; four rows a step unless other batches are given."""
    batches = batches or [to_batch(rows(4))]
    settings = {"log_interval": 1, "learning_rate": 0.05, "eval_interval": 0, "save_interval": 0} | settings
    cfg = with_sizes(config_from_dict(settings), 1)
    batch_schedule = BatchSchedule.of(cfg, 1)
    model, record = model or Bigram(), Record()
    stack = Stack(
        model,
        torch.optim.AdamW(model.parameters(), weight_decay=0.0, fused=True),
        Strategy("single", torch.device("cpu"), cfg),
        torch.enable_grad,
        learning_rate=lambda step: learning_rate(step, cfg.optim, total_steps, batch_schedule.position),
        total_steps=total_steps,
        scaling=scaling or Scaling(),
    )
    meter = Meter(SHAPE, 1, {"bf16": None, "fp8": None})
    evaluation = ListLoader(eval_batches) if eval_batches else None
    loaders = SimpleNamespace(train=ListLoader(batches), eval=evaluation)
    logs = Logs(record, record, meter)
    began = time.perf_counter() - 1.0
    wall_time = WallTime(Path(os.devnull), progress or Progress(), began, gpus=0, nodes=1)  # writes no file
    return Trainer(cfg, stack, batch_schedule, loaders, logs, saver or Saver(), wall_time, Hooks()), record


def stopped(made) -> bool:
    """True if a stop signal ended the training early."""
    with handling_stop_signals(made.stop):
        return not made.train()


def weight(made) -> torch.Tensor:
    return made.stack.wrapped.table.weight.detach().clone()


class Poisoned(Bigram):
    """Multiplies the loss by `value` at chosen calls."""

    def __init__(self, calls, value=math.nan):
        super().__init__()
        self.chosen, self.value, self.calls = set(calls), value, 0

    def forward(self, input_ids, labels):
        out = super().forward(input_ids, labels)
        self.calls += 1
        return TokenLoss(out.loss * self.value, out.correct) if self.calls in self.chosen else out


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_split_into_micro_batches_gives_the_same_run(size):
    """24 rows as four steps of 6 rows, in micro-batches of `size` and in one."""
    data = rows(24)
    unsplit, expected = trainer([to_batch(data[i : i + 6]) for i in range(0, 24, 6)], total_steps=4)
    micro_batches = [to_batch(data[i : i + size]) for i in range(0, 24, size)]
    split, got = trainer(micro_batches, total_steps=4, gradient_accumulation_steps=6 // size)
    assert unsplit.train() and split.train()
    for name in ("train/loss", "train/grad_norm"):
        assert got.series(name) == pytest.approx(expected.series(name), rel=1e-5)
    torch.testing.assert_close(weight(split), weight(unsplit), rtol=1e-5, atol=1e-6)


def test_a_shorter_last_step_of_an_epoch_is_trained_on():
    """7 micro-batches at 3 a step: 3 steps an epoch, the third with one micro-batch."""
    data = rows(7)
    made, record = trainer([to_batch([r]) for r in data], total_steps=6, gradient_accumulation_steps=3)
    made.train()
    labels = sum(int((r[1] != -100).sum()) for r in data)
    assert made.progress.label_tokens == 2 * labels and made.loaders.train.state.epoch == 2
    assert made.progress.real_tokens == 2 * 7 * 12
    assert record.series("train/epoch") == pytest.approx([3 / 7, 6 / 7, 1, 10 / 7, 13 / 7, 2])


def test_a_ramp_takes_more_micro_batches_and_scales_the_gradients_amaxes():
    """1, 2 and 4 micro-batches in two steps each."""
    scaling, shape = CountingScaling(), {"batch_size": 1, "max_seq_length": 16}
    data = [to_batch([row]) for row in rows(14)]
    made, record = trainer(data, total_steps=6, batch_ramp="16:0 32:32 64:96", scaling=scaling, **shape)
    assert made.train()
    assert record.series("train/tokens_per_step") == [16, 16, 32, 32, 64, 64]
    assert record.series("train/tokens_seen") == [16, 32, 64, 96, 160, 224]
    assert [event for event in scaling.events if event != "prepare"] == [0.5, 0.5], "with each larger batch"


def test_gradients_are_clipped_by_their_global_norm():
    free, unclipped = trainer(total_steps=1, max_grad_norm=0)
    clipped, record = trainer(total_steps=1, max_grad_norm=1e-3)
    loose, _ = trainer(total_steps=1, max_grad_norm=1e3)
    assert free.train() and clipped.train() and loose.train()
    assert record.series("train/grad_norm") == unclipped.series("train/grad_norm")
    moment = clipped.stack.optimizer.state[clipped.stack.wrapped.table.weight]["exp_avg"]
    assert moment.norm().item() == pytest.approx(0.1 * 1e-3, rel=1e-4)  # 1 - beta1 is 0.1
    assert torch.equal(weight(loose), weight(free))


def test_the_learning_rate_of_every_step_reaches_all_parameter_groups():
    made, record = trainer(total_steps=4, lr_scheduler="linear", num_warmup_steps=2, learning_rate=0.4)
    made.stack.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    used = []
    groups = made.stack.optimizer.param_groups
    made.stack.optimizer.register_step_pre_hook(lambda *_: used.append([group["lr"] for group in groups]))
    made.train()
    logged = record.series("train/learning_rate")
    assert logged == pytest.approx([0.2, 0.4, 0.4, 0.2])
    assert used == [[rate, rate] for rate in logged]


class CountingScaling(Scaling):
    def __init__(self):
        self.events = []

    def prepare(self, batch):
        self.events.append("prepare")

    @contextmanager
    def frozen(self):
        self.events.append("freeze")
        yield
        self.events.append("thaw")

    def scrub(self):
        self.events.append("scrub")

    def scale_gradients(self, factor):
        self.events.append(factor)


@pytest.mark.parametrize(
    ("calls", "skipped", "stops_at", "message"),
    [
        ({2, *range(4, 12)}, 0, 8, "5 steps in a row .*--learning_rate"),
        ({1}, 4, 9, "5 steps in a row"),  # counted across launches
        (set(range(9)), 0, 5, "weights of --model_name may be damaged"),
    ],
)
def test_steps_skipped_in_a_row_stop_the_run(calls, skipped, stops_at, message):
    progress, scaling = (
        Progress(step=2 * skipped, skipped_steps=skipped, skipped_in_a_row=skipped),
        CountingScaling(),
    )
    made, _ = trainer(total_steps=12, model=Poisoned(calls), progress=progress, scaling=scaling)
    with pytest.raises(UserError, match=message):
        made.train()
    assert made.progress.step == stops_at
    assert made.progress.skipped_steps == skipped + scaling.events.count("scrub")


class ScaledGradient(Bigram):
    """Rounds a multiple of its gradient to FP16; it overflows until the loss scale is small enough."""

    def __init__(self, factor):
        super().__init__()
        self.table.weight.register_hook(lambda gradient: (gradient * factor).half().float() / factor)


def test_a_gradient_that_overflows_at_every_loss_scale_stops_the_run():
    made, _ = trainer(total_steps=99, model=ScaledGradient(1e9), mixed_precision="fp16")
    with pytest.raises(UserError, match=r"5 steps in a row .*FP16's 65,504 .*--mixed_precision bf16"):
        made.train()
    assert made.progress.step == 16 + 5
    assert made.progress.overflow_steps == 16 and made.stack.strategy.loss_scale.value == 1


def test_a_run_whose_final_weights_have_no_finite_eval_loss_is_saved_and_fails():
    batches = [to_batch(rows(4))]
    made, _ = trainer(batches, total_steps=2, eval_batches=batches, model=Poisoned({3}))
    with pytest.raises(UserError, match="the final weights have eval loss nan"):
        made.train()
    assert made.saver.saved_step == 2


def test_steps_without_label_tokens_are_skipped_and_stop_the_run():
    ids, labels = rows(1)[0]
    unlabeled = [to_batch([(ids, torch.full_like(labels, -100))])]
    made, record = trainer(unlabeled, total_steps=9)
    before = weight(made)
    with pytest.raises(UserError, match="5 steps in a row had no label tokens"):
        made.train()
    assert torch.equal(before, weight(made)) and record.series("train/loss") == [0.0] * 4
    assert made.progress.skipped_steps == 5 and "no label tokens" in record.messages[0]


@pytest.mark.parametrize(("calls", "value", "spikes"), [({5, 25}, 15.0, [25]), (range(1, 29), 0.0, [])])
def test_gradient_spikes_are_applied_and_logged_once_there_is_a_median(calls, value, spikes):
    made, record = trainer(total_steps=30, model=Poisoned(calls, value))
    made.train()
    logged = [message for message in record.messages if "times the median" in message]
    assert [int(message.split()[2].rstrip(":")) for message in logged] == spikes
    assert made.progress.skipped_steps == 0


def test_evaluation_is_weighted_by_tokens():
    data = rows(5, seed=3)
    uneven = [to_batch(data[:1]), to_batch(data[1:])]
    made, record = trainer([to_batch(data)], total_steps=0, eval_batches=uneven)
    before = weight(made)
    assert made.train()
    ids, labels = (torch.stack(t) for t in zip(*data, strict=True))
    with torch.no_grad():
        logits = made.stack.wrapped.table(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).item()
    accuracy = ((logits.argmax(-1) == labels) & (labels != -100)).sum() / (labels != -100).sum()
    expected = {"loss": loss, "perplexity": math.exp(loss), "token_accuracy": accuracy.item()}
    assert {name: record.series(f"eval/{name}")[0] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert made.stack.wrapped.training and torch.equal(before, weight(made))


def test_evaluations_and_saves_happen_when_due_and_once_at_the_end():
    due = {"eval_interval": 3, "save_interval": 2, "eval_at_start": True}
    made, record = trainer(total_steps=7, eval_batches=[to_batch(rows(2))], **due)
    made.train()
    assert [step for step, metrics in record.lines if "eval/loss" in metrics] == [0, 3, 6, 7]
    saves = [2, 4, 6, "6 evaluated", 7, "7 evaluated"]
    assert made.saver.events == saves, "saved first"
    assert made.progress.best_eval_loss == min(record.series("eval/loss"))


@pytest.mark.parametrize("save_seconds", [0, 90])
def test_a_timed_save_is_due_after_a_minute_of_training_and_once_at_the_end(save_seconds, advance):
    """20 s a step: every fourth begins a minute after the last save, however long that took."""
    saver = Saver(on_save=lambda: advance(save_seconds))
    due = {"save_interval": "1m", "eval_interval": 6, "log_interval": 5}
    made, _ = trainer(total_steps=16, eval_batches=[to_batch(rows(2))], saver=saver, **due)
    made.stack.optimizer.register_step_pre_hook(lambda *_: advance(20))
    advance(1000)  # of the start, which does not count
    assert made.train()
    saves = [4, 8, 12, "12 evaluated", 16, "16 evaluated"]
    assert saver.events == saves
    assert made.progress.train_seconds == 16 * 20


def test_a_non_finite_evaluation_is_never_the_best():
    batches = [to_batch(rows(4))]
    made, record = trainer(batches, total_steps=2, eval_batches=batches, eval_interval=1, model=Poisoned({2}))
    made.train()
    losses = record.series("eval/loss")
    assert math.isnan(losses[0]) and made.progress.best_eval_loss == losses[1]


@pytest.mark.parametrize("missed", [False, True])
def test_a_resumed_run_makes_up_for_a_missed_evaluation_only(missed):
    saver = Saver(saved_step=3, restored_unevaluated=missed)
    resumed = {"progress": Progress(step=3), "eval_interval": 3, "eval_at_start": True, "saver": saver}
    made, record = trainer(total_steps=8, eval_batches=[to_batch(rows(2))], **resumed)
    made.train()
    assert saver.events == ["3 evaluated"] * missed + [8, "8 evaluated"]
    assert [step for step, metrics in record.lines if "eval/loss" in metrics] == [3] * missed + [6, 8]


def test_evaluation_runs_in_eval_mode_with_frozen_scaling_that_is_prepared_first():
    model, scaling, seen = Bigram(), CountingScaling(), []
    model.register_forward_pre_hook(lambda module, _: seen.append((module.training, scaling.events[-1:])))
    batches = [to_batch(rows(4))]
    made, _ = trainer(batches, total_steps=1, model=model, eval_batches=batches, scaling=scaling)
    made.train()
    assert seen == [(True, ["prepare"]), (False, ["freeze"])]
    assert scaling.events == ["prepare", "prepare", "freeze", "thaw"]


def test_the_meter_by_hand():
    """Two steps of one and two batches on 2 GPUs: 30 real, 9 label and 48 padded tokens in 4 s."""
    meter = Meter(SHAPE, 2, {"bf16": 2.0, "fp8": None})
    batch = Batch({"input_ids": torch.zeros(2, 8)}, 3, 10, 16, 100, [0, 1])
    for _ in range(2):  # the second reading starts from zero
        for micro_batches, seconds, waited in (([batch], 1.0, 0.25), ([batch, batch], 3.0, 0.75)):
            meter.clock = time.perf_counter() - seconds
            meter.end_step(micro_batches, waited)
        meter.seconds = 4.0
        tflops = model_flops(SHAPE, tokens=30, sum_squared_lengths=300) / 4 / 2 / 1e12
        expected = {
            "perf/tokens_per_second": 7.5,
            "perf/label_tokens_per_second": 2.25,
            "perf/padded_tokens_per_second": 12.0,
            "perf/step_seconds": 2.0,
            "perf/data_wait_share": 0.25,
            "perf/model_tflops_per_gpu": tflops,
            "perf/mfu_bf16": tflops / 2,
        }
        assert meter.read(lambda counts: counts, lambda times: times, warm=True) == pytest.approx(expected)


def test_rates_count_every_second_of_a_step_and_none_of_evaluation_and_saving(advance):
    """2 s a step (4 s in the first three), 100 s an evaluation, 1,000 s a save."""

    class SlowEvaluation(ListLoader):
        def __iter__(self):
            advance(100)
            yield from super().__iter__()

    due = {"log_interval": 2, "eval_interval": 2, "save_interval": 3}
    made, record = trainer(total_steps=8, saver=Saver(on_save=lambda: advance(1000)), **due)
    made.loaders.eval = SlowEvaluation([to_batch(rows(2))])
    made.stack.optimizer.register_step_pre_hook(lambda *_: advance(4 if made.progress.step < 3 else 2))
    made.train()
    assert record.series("perf/step_seconds") == [4.0, 3.0, 2.0, 2.0]
    assert record.series("perf/tokens_per_second") == [12.0, 16.0, 24.0, 24.0]
    assert made.progress.train_seconds == 22.0
    assert made.results()["tokens_per_second"] == 24.0  # of the steps after warm-up
    kept = {"start": 1.0, "steps": 22.0, "saving": 3000.0, "evaluation": 400.0}
    assert {kind: s for kind, s in made.progress.seconds_by_kind.items() if s} == kept
    # Step 8 follows two saves and three evaluations.
    assert record.series("perf/goodput")[-1] == 22.0 / 2323.0
    assert record.series("perf/tokens_per_wall_second")[-1] == 8 * 48 / 2323.0


def test_data_wait_excludes_step_and_logging_time(advance):
    """3 s a batch, 1 s a step, 4 s a log line; the first batch belongs to no step."""

    class SlowList(list):
        def __iter__(self):
            for item in super().__iter__():
                advance(3)
                yield item

    made, record = trainer(SlowList([to_batch(rows(2))] * 4), total_steps=4)
    made.hooks.after_log = lambda: advance(4)
    made.stack.optimizer.register_step_pre_hook(lambda *_: advance(1))
    assert made.train()
    assert record.series("perf/data_wait_share") == [0.0, 3 / 4, 3 / 8, 3 / 8]
    kept = {"start": 1.0 + 3.0, "steps": 4.0, "data": 9.0, "other": 16.0}
    assert {kind: s for kind, s in made.progress.seconds_by_kind.items() if s} == kept


@pytest.mark.parametrize(("length", "uncounted"), [(LONG_STEP // 4 - 1, 5), (LONG_STEP // 4, 2)])
def test_long_steps_count_for_rates_from_the_third_one_on(length, uncounted):
    made, _ = trainer(total_steps=8, batch_size=2, gradient_accumulation_steps=2, max_seq_length=length)
    assert made.train() and len(made.logs.meter.rates) == 8 - uncounted


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("save_interval", [0, 1])
def test_a_signal_finishes_the_step_saves_once_and_stops(number, save_interval):
    def send(*_):
        os.kill(os.getpid(), number)

    saver = Saver(on_save=send)  # a second signal during the save changes nothing
    made, _ = trainer(total_steps=9, saver=saver, save_interval=save_interval)
    made.hooks.after_step = send
    handler = signal.getsignal(number)
    assert stopped(made)
    assert saver.events == [1] and made.progress.step == 1
    assert signal.getsignal(number) is handler


def test_a_signal_during_an_evaluation_ends_it():
    seen = []
    made, record = trainer(total_steps=2)

    class Interrupted(ListLoader):
        def __iter__(self):
            for batch in self.batches:
                seen.append(batch)
                made.stop.requested = True
                yield batch

    made.loaders.eval = Interrupted([to_batch(rows(2))] * 3)
    assert stopped(made)
    assert len(seen) < 3 and made.saver.events == [2] and not record.series("eval/loss")


class Hung(ListLoader):
    """Signals once `after` batches were read, and would then wait for ever."""

    def __init__(self, made, after):
        super().__init__(made.loaders.train.batches)
        self.made, self.after = made, after

    def __iter__(self):
        if self.after == 0:
            self.made.stop(signal.SIGTERM, None)
        for batch in super().__iter__():
            if self.done > self.after:
                self.made.stop(signal.SIGTERM, None)
                pytest.fail("it would wait for ever")
            yield batch


def test_a_signal_while_waiting_for_data_saves_the_last_step_and_its_position():
    """In the middle of a step's micro-batches, none of which may be lost on resume."""
    positions = []
    saver = Saver(on_save=lambda: positions.append(made.loaders.train.state_dict()))
    batches = [to_batch(rows(2)) for _ in range(8)]
    made, _ = trainer(batches, total_steps=4, gradient_accumulation_steps=2, saver=saver)
    made.loaders.train = Hung(made, 5)
    assert stopped(made)
    assert saver.events == [2] and positions == [{"epoch": 0, "done": 4}]
    made.stop(signal.SIGTERM, None)  # another one changes nothing


@pytest.mark.parametrize("early", [False, True])
def test_a_signal_before_the_first_step_saves_nothing(early):
    made, record = trainer([to_batch(rows(2))], total_steps=4)
    made.loaders.train = Hung(made, 0)
    if early:  # just before the wait begins
        state = made.loaders.train.state_dict
        made.loaders.train.state_dict = lambda: made.stop(signal.SIGTERM, None) or state()
    assert stopped(made) and record.messages == ["stopped by a signal before the first step"]
    assert not made.saver.events


def test_a_signal_to_a_forked_worker_does_not_end_the_wait():
    """Loader workers are forked within the wait for the first batch and inherit the handler."""
    made, _ = trainer([to_batch(rows(2))], total_steps=1)
    made.stop.waiting_pid = os.getpid() + 1
    made.stop(signal.SIGINT, None)
    made.stop.waiting_pid = os.getpid()
    with pytest.raises(Stopped):
        made.stop(signal.SIGINT, None)
