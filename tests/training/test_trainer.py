"""The loop with a ten-line model: the same run however it is split, and no non-finite step is taken."""

import math
import os
import signal
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from data.collate import Batch
from te_models.loss import TokenLoss
from training import trainer as trainer_module
from training.checkpoint.progress import Progress
from training.config import config_from_dict
from training.optim.schedule import learning_rate
from training.parallel.strategies import Strategy
from training.tracking.metrics import ModelShape, model_flops
from training.trainer import WARMUP_STEPS, Hooks, Meter, NonFinite, Stop, Trainer

CPU = torch.device("cpu")
SHAPE = ModelShape(
    hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, ffn_hidden_size=8, vocab_size=11
)


class Bigram(nn.Module):
    """Predicts the next token from the current one; its loss is a sum, as every model's here."""

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
    return Batch({"input_ids": ids, "labels": labels}, counted, ids.numel(), ids.numel(), 0, [])


class ListLoader:
    """Batches from a list, over and over; counts epochs as data.Loader does."""

    def __init__(self, batches):
        self.batches, self.epoch, self.done = batches, 0, 0
        self.micro_batches_per_epoch = len(batches)

    def __iter__(self):
        for batch in self.batches:
            self.done += 1
            yield batch
        self.epoch, self.done = self.epoch + 1, 0

    def micro_batches_left(self):
        return len(self.batches) - self.done

    def state_dict(self):
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state):
        self.epoch, self.done = state["epoch"], state["done"]


@dataclass
class Loaders:
    train: ListLoader
    eval: ListLoader | None = None


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


def trainer(batches, *, total_steps, model=None, eval_batches=None, hooks=None, strategy=None, **settings):
    start = {
        name: settings.pop(name) for name in ("progress", "saved_step", "owes_evaluation") if name in settings
    }
    settings = {"log_interval": 1, "learning_rate": 0.05, "eval_interval": 0, "save_interval": 0} | settings
    cfg = config_from_dict(settings)
    model, record = model or Bigram(), Record()
    made = Trainer(
        cfg,
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), weight_decay=0.0),
        strategy=strategy or Strategy(CPU),
        autocast=torch.enable_grad,
        learning_rate=lambda step: learning_rate(step, cfg.optim, total_steps),
        total_steps=total_steps,
        loaders=Loaders(ListLoader(batches), ListLoader(eval_batches) if eval_batches else None),
        tracker=record,
        display=record,
        meter=Meter(SHAPE, strategy.world_size if strategy else 1, {"bf16": None, "fp8": None}),
        hooks=hooks,
        **({"progress": Progress()} | start),
    )
    return made, record


def test_waiting_for_data_is_that_alone(monkeypatch):
    """A clock that moves 3 s a batch, 1 s a step and 4 s a line of the log; the first batch is on no step."""
    now = [0.0]
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: now[0])

    def pass_time(seconds):
        now[0] += seconds

    class SlowList(list):
        def __iter__(self):
            for item in super().__iter__():
                pass_time(3)
                yield item

    one, record = trainer(SlowList([to_batch(rows(2))] * 4), total_steps=4)
    log = record.log
    record.log = lambda *line: (pass_time(4), log(*line))
    one.optimizer.register_step_pre_hook(lambda *_: pass_time(1))
    assert one.fit()
    assert record.series("perf/data_wait_share") == [0.0, 3 / 4, 3 / 8, 3 / 8]


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_any_split_into_micro_batches_gives_the_same_run(size):
    """24 rows as four steps of 6 rows, each in micro-batches of `size`, against whole batches of 6."""
    data = rows(24)
    whole, expected = trainer([to_batch(data[i : i + 6]) for i in range(0, 24, 6)], total_steps=4)
    split, got = trainer(
        [to_batch(data[i : i + size]) for i in range(0, 24, size)],
        total_steps=4,
        gradient_accumulation_steps=6 // size,
    )
    assert whole.fit() and split.fit()
    for name in ("train/loss", "train/grad_norm"):
        assert got.series(name) == pytest.approx(expected.series(name), rel=1e-5)
    torch.testing.assert_close(split.model.table.weight, whole.model.table.weight, rtol=1e-5, atol=1e-6)


def test_the_loss_is_the_mean_over_label_tokens_of_the_whole_step():
    data = rows(4)
    one, record = trainer(
        [to_batch(data[:1]), to_batch(data[1:])], total_steps=1, gradient_accumulation_steps=2
    )
    ids, labels = (torch.stack(t) for t in zip(*data, strict=True))
    with torch.no_grad():
        expected = F.cross_entropy(one.model.table(ids).flatten(0, 1), labels.flatten(), ignore_index=-100)
    one.fit()
    assert record.series("train/loss") == [pytest.approx(expected.item(), rel=1e-6)]


def test_the_last_batch_and_window_of_an_epoch_are_trained_on():
    """7 micro-batches at 3 a step: 3 steps an epoch, the third on one micro-batch, then the next epoch."""
    data = rows(7)
    made, record = trainer([to_batch([r]) for r in data], total_steps=6, gradient_accumulation_steps=3)
    made.fit()
    labels = sum(int((r[1] != -100).sum()) for r in data)
    assert made.progress.label_tokens == 2 * labels and made.loaders.train.epoch == 2
    assert made.progress.real_tokens == 2 * 7 * 12
    assert record.series("train/epoch") == pytest.approx([3 / 7, 6 / 7, 1, 10 / 7, 13 / 7, 2])


def test_gradients_are_clipped_by_their_global_norm():
    data = [to_batch(rows(4))]
    free, unclipped = trainer(data, total_steps=1, max_grad_norm=0)
    clipped, record = trainer(data, total_steps=1, max_grad_norm=1e-3)
    seen = {}
    clipped.optimizer.register_step_pre_hook(
        lambda *_: seen.update(norm=clipped.model.table.weight.grad.norm().item())
    )
    free.fit()
    clipped.fit()
    assert record.series("train/grad_norm") == unclipped.series("train/grad_norm")
    assert seen["norm"] == pytest.approx(1e-3, rel=1e-4)
    loose, _ = trainer(data, total_steps=1, max_grad_norm=1e3)
    loose.fit()
    assert torch.equal(loose.model.table.weight, free.model.table.weight)


class Poisoned(Bigram):
    """Gives a non-finite loss at chosen calls."""

    def __init__(self, bad_calls, value=math.nan):
        super().__init__()
        self.bad, self.value, self.calls = set(bad_calls), value, 0

    def forward(self, input_ids, labels):
        out = super().forward(input_ids, labels)
        self.calls += 1
        return TokenLoss(out.loss * self.value, out.correct) if self.calls in self.bad else out


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_not_taken(value):
    model = Poisoned({2}, value)
    skips = []
    made, record = trainer(
        [to_batch(rows(4))], total_steps=3, model=model, hooks=Hooks(on_skipped=lambda: skips.append(1))
    )
    before = {}

    def watch(step, metrics):
        before[step] = model.table.weight.detach().clone()

    made.tracker.log = watch
    made.fit()
    assert torch.equal(before[1], before[2]) and not torch.equal(before[2], before[3])
    assert made.progress.skipped_steps == len(skips) == 1
    assert made.optimizer.state[model.table.weight]["step"] == 2
    assert any("step 2 not taken" in message for message in record.messages)


def test_a_spike_is_taken_and_told():
    made, record = trainer([to_batch(rows(4))], total_steps=30, model=Poisoned({5, 25}, 100.0))
    made.fit()
    told = [message for message in record.messages if "times the median" in message]
    assert len(told) == 1 and told[0].startswith("WARNING: step 25: the gradient norm ")
    assert made.progress.skipped_steps == 0


def test_gradients_of_zero_have_no_spikes():
    made, record = trainer([to_batch(rows(4))], total_steps=30, model=Poisoned(range(1, 29), 0.0))
    made.fit()
    assert made.progress.skipped_steps == 0 and not any("median" in text for text in record.messages)


def test_several_such_steps_in_a_row_stop_the_run_with_advice():
    made, _ = trainer(
        [to_batch(rows(4))], total_steps=20, model=Poisoned({2, 4, 5, 6, 7}), max_skipped_steps=3
    )
    with pytest.raises(NonFinite, match="--learning_rate"):
        made.fit()
    assert made.progress.step == 6 and made.progress.skipped_steps == 4


def test_a_run_that_took_no_step_at_all_is_no_success():
    made, _ = trainer([to_batch(rows(4))], total_steps=2, model=Poisoned({1, 2}), max_skipped_steps=5)
    with pytest.raises(NonFinite, match=r"2 steps in a row.* weights of --model_name may be damaged"):
        made.fit()


def test_a_window_without_label_tokens_changes_nothing():
    ids, labels = rows(1)[0]
    empty = to_batch([(ids, torch.full_like(labels, -100))])
    made, record = trainer([empty], total_steps=1)
    before = made.model.table.weight.detach().clone()
    made.fit()
    assert torch.equal(before, made.model.table.weight) and record.series("train/loss") == [0.0]
    assert made.progress.skipped_steps == 1


def test_evaluation_is_weighted_by_tokens():
    data = rows(5, seed=3)
    made, record = trainer(
        [to_batch(data)], total_steps=1, eval_batches=[to_batch(data[:1]), to_batch(data[1:])]
    )
    made.fit()
    ids, labels = (torch.stack(t) for t in zip(*data, strict=True))
    with torch.no_grad():
        logits = made.model.table(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).item()
    accuracy = ((logits.argmax(-1) == labels) & (labels != -100)).sum() / (labels != -100).sum()
    assert record.series("eval/loss") == [pytest.approx(loss, rel=1e-6)]
    assert record.series("eval/perplexity") == [pytest.approx(math.exp(loss), rel=1e-5)]
    assert record.series("eval/token_accuracy") == [pytest.approx(accuracy.item())]
    assert made.model.training


def test_evaluations_and_saves_come_when_asked_and_once_at_the_end():
    saved = []
    hooks = Hooks(
        save=lambda step, eval_loss: saved.append((step, eval_loss)),
        rate=lambda step, eval_loss: saved.append(f"{step} rated"),
    )
    made, record = trainer(
        [to_batch(rows(4))],
        total_steps=7,
        eval_batches=[to_batch(rows(2))],
        hooks=hooks,
        eval_interval=3,
        save_interval=2,
        eval_at_start=True,
    )
    made.fit()
    assert [step for step, metrics in record.lines if "eval/loss" in metrics] == [0, 3, 6, 7]
    assert saved == [(2, None), (4, None), (6, None), "6 rated", (7, None), "7 rated"], "saved first"
    assert made.progress.best_eval_loss == min(record.series("eval/loss"))


def test_an_evaluation_that_is_not_finite_is_never_the_best():
    batches = [to_batch(rows(4))]
    made, record = trainer(batches, total_steps=2, eval_batches=batches, eval_interval=1)
    others = {"eval/perplexity": 1.0, "eval/token_accuracy": 0.0}
    losses = iter([math.nan, 1.0])
    made.evaluate = lambda: {"eval/loss": next(losses)} | others
    made.fit()
    assert len(record.series("eval/loss")) == 2 and made.progress.best_eval_loss == 1.0


@pytest.mark.parametrize("owed", [False, True])
def test_an_evaluation_that_a_start_was_stopped_in_is_made_up_for(owed):
    rated = []
    made, record = trainer(
        [to_batch(rows(4))],
        total_steps=8,
        eval_batches=[to_batch(rows(2))],
        progress=Progress(step=3),
        eval_interval=3,
        saved_step=3,
        owes_evaluation=owed,
        hooks=Hooks(rate=lambda step, eval_loss: rated.append(step)),
    )
    made.fit()
    assert rated == [3] * owed + [8], "what is saved: the start's checkpoint and the end"
    assert [step for step, metrics in record.lines if "eval/loss" in metrics] == [3] * owed + [6, 8]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("save_interval", [0, 1])
def test_a_signal_finishes_the_step_saves_once_and_stops(number, save_interval):
    saved = []

    def on_first_step():
        os.kill(os.getpid(), number)

    def save(step, eval_loss):
        saved.append(step)
        os.kill(os.getpid(), number)  # a second one during the save changes nothing

    hooks = Hooks(after_first_step=on_first_step, save=save)
    made, _ = trainer([to_batch(rows(4))], total_steps=9, hooks=hooks, save_interval=save_interval)
    handler = signal.getsignal(number)
    assert made.fit() is False
    assert saved == [1] and made.progress.step == 1
    assert signal.getsignal(number) is handler


def test_a_signal_during_the_last_save_stops_what_would_come_after_it():
    hooks = Hooks(save=lambda step, eval_loss: os.kill(os.getpid(), signal.SIGTERM))
    made, _ = trainer([to_batch(rows(4))], total_steps=1, hooks=hooks)
    assert made.fit() is False and made.progress.step == 1


def test_zero_steps_only_evaluate():
    made, record = trainer([to_batch(rows(4))], total_steps=0, eval_batches=[to_batch(rows(2))])
    before = made.model.table.weight.detach().clone()
    assert made.fit()
    assert len(record.series("eval/loss")) == 1 and torch.equal(before, made.model.table.weight)


def test_the_learning_rate_of_every_step_reaches_the_optimizer():
    made, record = trainer(
        [to_batch(rows(4))], total_steps=4, lr_scheduler="linear", num_warmup_steps=2, learning_rate=0.4
    )
    made.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    used = []
    made.optimizer.register_step_pre_hook(lambda opt, *_: used.append([g["lr"] for g in opt.param_groups]))
    made.fit()
    rates = record.series("train/learning_rate")
    assert rates == pytest.approx([0.2, 0.4, 0.4, 0.2])
    assert used == [[rate, rate] for rate in rates]


def test_rates_count_every_second_of_a_step_and_none_of_an_evaluation(monkeypatch):
    """A clock that moves 2 s a step (4 s in the first three), 100 s an evaluation and 1,000 s a save."""
    now = [0.0]
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: now[0])
    made, record = trainer(
        [to_batch(rows(4))] * 8,
        total_steps=8,
        eval_batches=[to_batch(rows(2))],
        hooks=Hooks(save=lambda *_: now.__setitem__(0, now[0] + 1000)),
        log_interval=2,
        eval_interval=2,
        save_interval=3,
    )
    made.optimizer.register_step_pre_hook(
        lambda *_: now.__setitem__(0, now[0] + (4 if made.progress.step < 3 else 2))
    )
    evaluate = made.evaluate
    made.evaluate = lambda: now.__setitem__(0, now[0] + 100) or evaluate()
    made.fit()
    assert record.series("perf/step_seconds") == [4.0, 3.0, 2.0, 2.0]
    assert record.series("perf/tokens_per_second") == [12.0, 16.0, 24.0, 24.0]
    assert made.progress.train_seconds == 22.0
    assert made.results()["tokens_per_second"] == 24.0  # of the steps after warm-up


def test_a_signal_during_an_evaluation_ends_it_and_saves():
    saved, seen = [], []
    made, record = trainer(
        [to_batch(rows(4))],
        total_steps=2,
        eval_batches=[to_batch(rows(2))] * 3,
        hooks=Hooks(save=lambda step, eval_loss: saved.append((step, eval_loss))),
    )

    class Interrupted(ListLoader):
        def __iter__(self):
            for batch in self.batches:
                seen.append(batch)
                made.stop_requested = True
                yield batch

    made.loaders.eval = Interrupted(made.loaders.eval.batches)
    assert made.fit() is False
    assert len(seen) < 3 and saved == [(2, None)] and not record.series("eval/loss")


class TwoRanks(Strategy):
    """One of two ranks that are given the same batches: sums double, averaged gradients stay."""

    def __init__(self, device, other_stops=False):
        super().__init__(device)
        self.world_size = 2
        self.other_stops, self.exchanges = other_stops, []

    def accumulating(self, model, *, first, last):
        self.exchanges.append(last)
        return super().accumulating(model, first=first, last=last)

    def sum(self, tensor):
        doubled = 2 * tensor
        if tensor.shape == (2,):  # the loss, and whether a rank was asked to stop
            doubled[1] += self.other_stops
        return doubled

    def any(self, flag):
        return flag or self.other_stops


def test_two_ranks_with_the_same_batches_train_as_one_of_them():
    data = [to_batch([r]) for r in rows(4)]
    options = {"total_steps": 3, "eval_batches": data, "gradient_accumulation_steps": 2}
    (one, expected), (two, got) = (trainer(data, strategy=s, **options) for s in (None, TwoRanks(CPU)))
    assert one.fit() and two.fit()
    for name in ("train/loss", "train/grad_norm", "eval/loss", "eval/token_accuracy"):
        assert got.series(name) == pytest.approx(expected.series(name), rel=1e-6)
    torch.testing.assert_close(two.model.table.weight, one.model.table.weight)
    assert got.series("eval/label_tokens") == [2 * n for n in expected.series("eval/label_tokens")]
    assert two.strategy.exchanges == [False, True] * 3

    def per_step(record, name):
        return [m[name] * m["perf/step_seconds"] for _, m in record.lines if name in m]

    name = "perf/tokens_per_second"
    assert per_step(got, name) == pytest.approx([2 * n for n in per_step(expected, name)])
    name = "perf/model_tflops_per_gpu"
    assert per_step(got, name) == pytest.approx(per_step(expected, name))


def test_a_signal_on_another_rank_stops_this_one_too():
    made, _ = trainer([to_batch(rows(4))], total_steps=9, strategy=TwoRanks(CPU, other_stops=True))
    assert made.fit() is False and made.progress.step == 1


def add_infinity(model):
    forward = model.forward
    model.forward = lambda **inputs: TokenLoss(forward(**inputs).loss + math.inf, torch.tensor(0))


@pytest.mark.parametrize(
    "spoil",
    [add_infinity, lambda model: model.table.weight.register_hook(lambda gradient: gradient * math.inf)],
    ids=["loss alone", "gradient alone"],
)
def test_loss_and_gradient_must_both_be_finite(spoil):
    made, _ = trainer([to_batch(rows(4))], total_steps=1)
    spoil(made.model)
    before = made.model.table.weight.detach().clone()
    with pytest.raises(NonFinite):
        made.fit()
    assert made.progress.skipped_steps == 1 and torch.equal(before, made.model.table.weight)


def test_evaluation_forwards_are_in_eval_mode_and_inside_their_hook():
    model, inside, seen = Bigram(), [], []

    @contextmanager
    def evaluating():
        inside.append(True)
        yield
        inside.clear()

    model.register_forward_pre_hook(lambda module, _: seen.append((module.training, bool(inside))))
    batches = [to_batch(rows(4))]
    made, _ = trainer(
        batches, total_steps=1, model=model, eval_batches=batches, hooks=Hooks(evaluating=evaluating)
    )
    made.fit()
    assert seen == [(True, False), (False, True)]


def test_evaluation_leaves_alone_what_its_first_batch_prepared():
    events = []

    @contextmanager
    def evaluating():
        events.append("evaluating")
        yield

    hooks = Hooks(prepare=lambda batch: events.append("prepared"), evaluating=evaluating)
    batches = [to_batch(rows(4))]
    made, _ = trainer(batches, total_steps=0, eval_batches=batches * 2, hooks=hooks)
    made.fit()
    assert events == ["prepared", "evaluating"]


def test_a_stop_saves_after_the_verdict_on_its_last_step(monkeypatch):
    """On a GPU the newest verdict is read a step later, which a step that is not finite must not survive."""
    saved, skipped = [], []
    hooks = Hooks(
        after_first_step=lambda: os.kill(os.getpid(), signal.SIGTERM),
        save=lambda step, eval_loss: saved.append((step, made.progress.skipped_steps, list(skipped))),
        on_skipped=lambda: skipped.append(made.progress.step),
    )
    made, _ = trainer([to_batch(rows(4))], total_steps=9, hooks=hooks, log_interval=5)
    judge = made._judge
    monkeypatch.setattr(
        made, "_judge", lambda *, all_of_them: judge(all_of_them=all_of_them and bool(saved_now))
    )
    saved_now = []
    stop = made._stop
    monkeypatch.setattr(made, "_stop", lambda: saved_now.append(1) or stop())
    add_infinity(made.model)
    assert made.fit() is False and saved == [(1, 1, [1])]


def test_rates_of_a_resumed_run_leave_its_own_warm_up_out():
    made, _ = trainer([to_batch(rows(4))], total_steps=30, log_interval=5, batch_size=4)
    resumed, _ = trainer([to_batch(rows(4))], total_steps=30, log_interval=5, batch_size=4)
    resumed.progress.step = resumed._began = 10
    assert made.fit() and resumed.fit()
    assert (len(made.rates), len(resumed.rates)) == (5, 3)


def test_an_epochs_last_smaller_step_is_in_no_rate_of_the_summary_unless_there_is_no_other():
    batches = [to_batch(rows(4)), to_batch(rows(4)), to_batch(rows(2))]
    made, record = trainer(batches, total_steps=30, batch_size=4)
    made.fit()
    logged = record.series("perf/tokens_per_second")
    full = [rate for step, rate in enumerate(logged) if step >= WARMUP_STEPS and step % 3 != 2]
    assert made.results()["tokens_per_second"] == median(full)
    small, record = trainer(batches, total_steps=30, batch_size=8)
    small.fit()
    logged = record.series("perf/tokens_per_second")
    assert small.results()["tokens_per_second"] == median(logged[WARMUP_STEPS:])


def test_a_rank_that_has_only_padding_adds_no_row_to_a_step():
    meter = Meter(SHAPE, 2, {"bf16": None, "fp8": None})
    full, padding = (Batch({"input_ids": torch.zeros(1, 8)}, n, n, 8, n * n, []) for n in (8, 0))
    meter.add([full], 1.0, 0.0)
    meter.add([padding], 1.0, 0.0)
    meter.read(lambda counts: counts, lambda seconds: seconds)
    assert meter.rows_per_step == 0.5


def test_a_resumed_run_does_not_evaluate_at_its_start():
    made, record = trainer(
        [to_batch(rows(4))], total_steps=4, eval_batches=[to_batch(rows(2))], eval_at_start=True
    )
    made.progress.step = 2
    made.fit()
    assert [step for step, metrics in record.lines if "eval/loss" in metrics] == [4]


def test_the_meter_by_hand():
    """Two steps of one and two batches on 2 GPUs: 30 real, 9 label and 48 padded tokens in 4 s."""
    meter = Meter(SHAPE, 2, {"bf16": 2.0, "fp8": None})
    batch = Batch({"input_ids": torch.zeros(2, 8)}, 3, 10, 16, 100, [])
    for _ in range(2):  # the second reading starts from nothing
        meter.add([batch], 1.0, 0.25)
        meter.add([batch, batch], 3.0, 0.75)
        tflops = model_flops(SHAPE, tokens=30, sum_squared_lengths=300) / 4 / 2 / 1e12
        assert meter.read(lambda counts: counts, lambda seconds: seconds) == pytest.approx(
            {
                "perf/tokens_per_second": 7.5,
                "perf/label_tokens_per_second": 2.25,
                "perf/padded_tokens_per_second": 12.0,
                "perf/step_seconds": 2.0,
                "perf/data_wait_share": 0.25,
                "perf/model_tflops_per_gpu": tflops,
                "perf/mfu_bf16": tflops / 2,
            }
        )
        assert meter.rows_per_step == 3


def test_a_signal_while_data_is_waited_for_saves_the_last_step_and_its_place():
    """In the middle of a step's micro-batches, of which none may be lost on the resume."""
    saved = []
    made, _ = trainer(
        [to_batch(rows(2)) for _ in range(8)],
        total_steps=4,
        gradient_accumulation_steps=2,
        hooks=Hooks(save=lambda step, _: saved.append((step, made.loaders.train.state_dict()))),
    )

    class Hung(ListLoader):
        def __iter__(self):
            for batch in super().__iter__():
                if self.done == 6:
                    made._on_signal(signal.SIGTERM, None)
                    pytest.fail("it would wait for ever")
                yield batch

    made.loaders.train = Hung(made.loaders.train.batches)
    assert made.fit() is False
    assert saved == [(2, {"epoch": 0, "done": 4})]
    made._on_signal(signal.SIGTERM, None)  # another one does nothing


def test_a_signal_before_the_first_step_saves_nothing():
    made, record = trainer([to_batch(rows(2))], total_steps=4, hooks=Hooks(save=lambda *_: pytest.fail()))

    class Hung(ListLoader):
        def __iter__(self):
            made._on_signal(signal.SIGTERM, None)
            yield from ()

    made.loaders.train = Hung(made.loaders.train.batches)
    assert made.fit() is False and record.messages == ["stopped by a signal after step 0"]


def test_a_signal_just_before_data_is_waited_for_ends_the_wait():
    made, record = trainer([to_batch(rows(2))], total_steps=4)

    class Hung(ListLoader):
        def state_dict(self):
            made._on_signal(signal.SIGTERM, None)
            return super().state_dict()

        def __iter__(self):
            yield pytest.fail("it would wait for ever")

    made.loaders.train = Hung(made.loaders.train.batches)
    assert made.fit() is False and record.messages == ["stopped by a signal after step 0"]


def test_skipped_steps_in_a_row_are_counted_over_starts():
    progress = Progress(step=4, skipped_steps=2, skipped_in_a_row=2)
    made, _ = trainer(
        [to_batch(rows(4))], total_steps=9, model=Poisoned({1}), progress=progress, max_skipped_steps=3
    )
    with pytest.raises(NonFinite, match="3 steps in a row"):
        made.fit()


def test_a_run_says_that_its_last_steps_were_not_taken():
    made, record = trainer([to_batch(rows(4))], total_steps=3, model=Poisoned({2, 3}))
    assert made.fit() and made.progress.skipped_in_a_row == 2
    assert "WARNING: the last 2 steps were not taken: the weights are older" in record.messages


def test_a_signal_to_a_forked_worker_ends_no_wait():
    """Workers start within the wait for the first batch, and have this process's handlers."""
    made, _ = trainer([to_batch(rows(2))], total_steps=1)
    made._waiting = os.getpid() + 1
    made._on_signal(signal.SIGINT, None)
    made._waiting = os.getpid()
    with pytest.raises(Stop):
        made._on_signal(signal.SIGINT, None)
