"""benchmarks.evaluate on a GPU: exports of a run in BF16 and FP8, batched answers, a full memory."""

import json

import pytest
import torch
from fp8_suite.benchmarks.evaluate.main import main
from fp8_suite.benchmarks.evaluate.measure import in_batches

from tests.gpu.test_run import SMALL, train

pytestmark = pytest.mark.gpu


def test_exports_of_a_run(tmp_path):
    pytest.importorskip("accelerate")
    train(tmp_path / "run", f"{SMALL} --mixed_precision fp8 --export_dtype both")
    results = {}
    for size in (1, 8):
        argv = [str(tmp_path / "run"), "--max_new_tokens", "40", "--batch_size", str(size)]
        assert main([*argv, "--output_dir", str(tmp_path / "evaluated")]) == 0
        rows = json.loads((tmp_path / "evaluated/evaluation.json").read_text())["results"]
        results[size] = {(row["measure"], row["export"]): row for row in rows}
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    for (measure, export), row in results[8].items():
        assert row["value"] == pytest.approx(results[1][measure, export]["value"], abs=0.05)
        if measure == "loss":
            assert row["value"] == pytest.approx(summary["eval_loss"], rel=0.01)
    assert {(row["export"], row["weights"]) for row in results[8].values()} == {
        ("export", "bf16"),
        ("export_fp8", "fp8, dequantized"),
    }


def test_a_batch_that_does_not_fit_is_halved():
    free, _ = torch.cuda.mem_get_info()
    sizes = []

    def allocate(indices):
        sizes.append(len(indices))
        block = torch.empty(len(indices), free // 3, dtype=torch.uint8, device="cuda")
        return [block.shape[1]] * len(indices)

    assert len(in_batches([1] * 8, 8, allocate)) == 8
    assert sizes == [8, 4, *[2] * 4]
