"""benchmarks.peers: the stack trains, and leaves a run folder with its rates."""

import pytest
import torch
from fp8_suite.benchmarks.peers import PRECISIONS, main
from fp8_suite.benchmarks.records.runs import read_run


@pytest.mark.parametrize(
    ("precision", "micro_batches"), [*((precision, 1) for precision in PRECISIONS), ("bf16", 3)]
)
def test_a_peer_trains_and_records_its_rates(precision, micro_batches, tmp_path):
    sizes = "--model_name tiny-llama --max_seq_length 64 --batch_size 2 --steps 7"
    sizes += f" --gradient_accumulation_steps {micro_batches}" * (micro_batches > 1)
    flags = f"{sizes} --precision {precision} --device cpu --output_dir {tmp_path}"
    assert main(flags.split()) == 0
    stack = "transformers" if precision == "bf16" else "transformers+torchao"
    run = read_run(tmp_path / (f"{stack}-tiny-llama-{precision}-64x2" + "x3" * (micro_batches > 1)))
    rates = [rate for _, rate in run.series("perf/tokens_per_second")]
    assert run.value("recipe") == precision and run.value("steps") == 7 and not run.timed, "on a CPU"
    assert 2 / run.summary["tokens_per_second"] == pytest.approx(1 / rates[5] + 1 / rates[6])
    assert run.config["gradient_accumulation_steps"] == micro_batches
    assert run.environment["versions"]["torch"] == torch.__version__
    assert all(7 < loss < 9 for _, loss in run.series("train/loss"))  # ln 2048 = 7.6


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model_name tiny-llama --steps 5", "--steps 5: the first 5 steps are not measured"),
        ("--model_name tiny-lama", "did you mean 'tiny-llama'?"),
        ("--model_name tiny-llama --steps 7", "--device cuda: no GPU"),
    ],
)
def test_bad_input_is_one_line(flags, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([*flags.split(), "--output_dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())
