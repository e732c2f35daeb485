"""What `auto` chooses on a GPU fits, and needs the memory that was predicted."""

import json
import re

import pytest

from tests.gpu.test_run import losses, train

pytestmark = pytest.mark.gpu
LARGE = (
    "--model_name meta-llama/Llama-3.2-1B --init random --tokenizer_name demo --use_te --mixed_precision fp8 "
    "--max_seq_length 2048 --max_steps 3 --log_interval 1 --eval_samples 0 --num_workers 0 --no_export "
    "--no_save_checkpoints --global_batch_size 32 --batch_size auto --recompute auto --memory_limit_gb"
)
CHOICE = (
    r"fit: --batch_size (\d+) x (\d+) micro-batches, --recompute (\S+); predicted ([\d.]+) of ([\d.]+) GB"
)


SMALLEST = "--moment_dtype fp8 --grad_reduce_dtype bf16 --offload_optimizer --fp8_weights"


@pytest.mark.parametrize(
    ("gb", "flags", "recomputes"), [(26, "", True), (50, "", False), (14, SMALLEST, True)]
)
def test_the_choice_fits_as_predicted(tmp_path, gb, flags, recomputes):
    output = train(tmp_path / "run", f"{LARGE} {gb} {flags}")
    batch, accumulation, recompute, predicted, free = re.search(CHOICE, output).groups()
    assert int(batch) * int(accumulation) == 32 and (recompute != "none") == recomputes
    assert float(predicted) <= gb - 2 and float(free) == gb
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["peak_memory_gb"] == pytest.approx(summary["predicted_memory_gb"], rel=0.04)
    assert len(losses(tmp_path / "run")) == 3


def test_what_cannot_fit_is_refused_before_the_model_is_built(tmp_path):
    output = train(tmp_path / "run", f"{LARGE} 20", code=2)
    assert re.search(
        r"--recompute full a step is predicted to need [\d.]+ of 20.0 GB, [\d.]+ GB too much", output
    )
    assert "; use --moment_dtype fp8 (" in output and not (tmp_path / "run").exists()
