"""benchmarks.evaluate: answers in texts, a model whose accuracy is known, its table and files, lm-eval."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fp8_suite.benchmarks.evaluate.answers import expected_answer, final_answer, same_answer
from fp8_suite.benchmarks.evaluate.main import main
from fp8_suite.benchmarks.evaluate.measure import generate, in_batches
from fp8_suite.benchmarks.evaluate.targets import find_targets
from fp8_suite.benchmarks.records.evaluation import Result, write_results
from fp8_suite.benchmarks.records.runs import RunRecord, read_run
from fp8_suite.benchmarks.report.judge import judge_evaluated
from fp8_suite.core.errors import UserError
from fp8_suite.data.rendering import Renderer
from fp8_suite.data.tokenizer import load_tokenizer
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.benchmarks.folders import write_run
from tests.fp8_checkpoints import fine_grained, quantized, smallest


@pytest.mark.parametrize(
    ("text", "expected", "correct"),
    [
        (r"\boxed{71}, no: \boxed{ 72 }", "72", True),
        (r"\boxed{72} and then \boxed{73", "72", True),  # cut while it wrote
        (r"\boxed{\frac{3}{4}}", "0.75", True),
        (r"\boxed{\dfrac34}", "3/4", True),
        (r"\boxed{1\frac{1}{2}}", r"1\frac{1}{2}", True),
        (r"\boxed{72\text{ dollars}}", "72", True),
        (r"\boxed{x = 5}", "5", True),
        (r"\boxed{10{,}000}", "10000", True),
        (r"\boxed{\$18}", "18", True),
        (r"\boxed{90^\circ}", "90", True),
        (r"\boxed{\text{Blue}}", "blue", True),
        (r"\boxed{(1,\ 2)}", "(1, 2)", True),
        (r"\boxed{2x}", "2", False),
        (r"\boxed{x^2}", "2", False),
        (r"\boxed{3, 5}", "5", False),
        ("He has 5 left.\n#### 1,234\n\nQuestion: 9?", "1234", True),
        ("It weighs 72.0 kg.", "72", True),
        ("**72**", "72", True),
        ("16 - 3 - 4 = 9 eggs", "9", True),
        ("he has 5-3", "3", True),
        ("it falls to -3 degrees", "-3", True),
        ("he loses -$5", "-5", True),
        ("\u22127", "-7", True),
        ("it is .5", "0.5", True),
        ("1,2,3", "3", True),
        ("10,000,000.00", "10000000", True),
        ("The answer is blue.", "Blue", True),
        ("720", "72", False),
        ("1/0", "1", False),
        ("", "72", False),
    ],
)
def test_final_answers_are_found_and_compared(text, expected, correct):
    assert same_answer(final_answer(text), expected) is correct


@pytest.mark.parametrize(
    ("row", "reference", "expected"),
    [
        ({"expected_answer": "(1, 2)", "answer": "3"}, "text", "(1, 2)"),
        ({"answer": 72.0}, "text", "72.0"),
        ({"answer": "2 + 2 = 4\n#### 4"}, "2 + 2 = 4\n#### 4", "4"),  # GSM8K
        ({"expected_answer": None}, r"so \boxed{4}", "4"),
        ({"answer": "It was in 1990."}, "It was in 1990.", None),  # an answer to chat about
        ({}, "It was in 1990.", None),
    ],
)
def test_expected_answers_come_from_a_column_or_are_marked(row, reference, expected):
    assert expected_answer(row, reference) == expected


ROWS = [  # (problem, solution that is learned, expected answer)
    ("one", "One it is: \\boxed{1}", "1.0"),
    ("two, which is longer", "The answer is $2.", "3"),
    ("three, which is the longest of all of them", "It is \\boxed{1,200}. Five.", "1200"),
    ("four", "No idea", "44"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on ROWS whose exports repeat all solutions, two of which are right; beside it, its base model."""
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    rows = [{"problem": p, "generated_solution": s, "expected_answer": e} for p, s, e in ROWS]
    data = folder.parent / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"dataset_name": str(data), "split_name": "train", "eval_split": "train", "system_prompt": ""}
    write_run(
        folder, losses=[1.0], summary={"steps": 10}, **settings | {"max_seq_length": 256, "num_proc": 1}
    )
    tokenizer = load_tokenizer("demo", family="llama")
    torch.manual_seed(0)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=2048, **shape, **ids))
    save(model, tokenizer, folder.parent / "base")
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    samples = [torch.tensor(tokens) for tokens in tokenize(tokenizer)]
    for _ in range(60):
        loss = sum(cross_entropy(model(s[None]).logits[0, :-1], s[1:]) for s in samples)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save(model, tokenizer, folder / "export")
    save_fp8(folder / "export", folder / "export-fp8")
    return folder


def tokenize(tokenizer, *, answers=True):
    render = Renderer(tokenizer, adds_bos=False).render
    chats = [[{"role": "user", "content": p}, {"role": "assistant", "content": s}] for p, s, _ in ROWS]
    texts = [render(chat) if answers else render(chat[:1], generate=True) for chat in chats]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def save(model, tokenizer, folder):
    model.bfloat16().save_pretrained(folder)
    model.float()
    tokenizer.save_pretrained(folder)


def save_fp8(source, folder):
    """Quantize an export's linear layers in blocks of 128 x 128."""
    shutil.copytree(source, folder)
    weights = load_file(source / "model.safetensors")
    for name in [name for name in weights if name.endswith("proj.weight")]:
        weights |= quantized(name, weights[name], fine_grained(), torch.float32, smallest)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": fine_grained()}))


def test_table_and_files_of_a_run_and_its_base(run, tmp_path, capsys):
    argv = [str(run.parent / "base"), str(run), "--max_new_tokens", "20", "--output_dir", str(tmp_path)]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "evaluation.json").read_text())
    assert "benchmarks.evaluate" in record["command"]
    results = {(r["measure"], r["export"]): r for r in record["results"]}
    assert {key: (r["value"], r["samples"]) for key, r in results.items() if key[0] == "exact_match"} == {
        ("exact_match", ""): (0.0, 4),
        ("exact_match", "export"): (0.5, 4),
        ("exact_match", "export-fp8"): (0.5, 4),
    }
    assert results["exact_match", ""]["stderr"] > 0.1, "none of 4 is no proof"
    assert results["exact_match", ""]["note"] == "4 cut at --max_new_tokens 20"
    assert results["exact_match", "export"]["weights"] == "bf16"
    assert results["exact_match", "export-fp8"]["weights"] == "fp8, dequantized"
    assert results["loss", ""]["value"] == pytest.approx(math.log(2048), abs=0.3)
    assert results["loss", "export"]["value"] == pytest.approx(answer_loss(run / "export"), rel=1e-4)
    table = (tmp_path / "evaluation.md").read_text()
    lines = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    assert [line[1:3] for line in lines[2:8]] == [
        [measure, str(name)]
        for measure in ("loss", "exact_match")
        for name in (run.parent / "base", run / "export", run / "export-fp8")
    ]
    assert lines[6][7] == "+0.5000 +- 0.2500", "paired"
    assert table.split("\n\n")[0] in printed
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [a["text"] for a in answers if a["export"] == "export"] == [solution for _, solution, _ in ROWS]
    assert [result.export for result in read_run(run).evaluation] == ["export"] * 2 + ["export-fp8"] * 2


def answer_loss(export):
    """Mean loss on the answers and their end, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    tokenizer = load_tokenizer(str(export), family="llama")
    losses = []
    for ids, prompt in zip(tokenize(tokenizer), tokenize(tokenizer, answers=False), strict=True):
        ids, start = torch.tensor(ids), len(prompt)
        losses.append(
            cross_entropy(model(ids[None]).logits[0, start - 1 : -1], ids[start:], reduction="none")
        )
    return torch.cat(losses).mean().item()


def test_batched_answers_equal_single_ones(run):
    tokenizer = load_tokenizer("demo", family="llama")
    model = AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32).eval()
    model.generation_config.repetition_penalty = 5.0  # greedy answers are without
    prompts = [ids[: 6 + 3 * i] for i, ids in enumerate(tokenize(tokenizer))]
    options = {"turn_end": None, "max_new_tokens": 12}
    batched, single = (generate(model, prompts, tokenizer, batch_size=size, **options) for size in (3, 1))
    assert batched == single
    assert model.generation_config.repetition_penalty == 5.0


def test_batches_are_halved_when_memory_is_full():
    sizes = []

    def double(indices):
        sizes.append(len(indices))
        if len(indices) > 2:
            raise torch.OutOfMemoryError("full")
        return [2 * i for i in indices]

    assert in_batches([5, 9, 1, 7, 3], 8, double) == [0, 2, 4, 6, 8]
    assert sizes == [5, 4, 2, 2, 1]

    def fail(indices):
        raise torch.OutOfMemoryError("full")

    with pytest.raises(UserError, match="one sample"):
        in_batches([1, 1], 2, fail)


def test_a_task_of_lm_eval(run, tmp_path):
    pytest.importorskip("lm_eval")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"question": "{i} +", "label": 0}}\n' for i in range(6)))
    (tmp_path / "task.yaml").write_text(f"""
task: local_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["1", "2"]
doc_to_target: label
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
""")
    argv = [str(run / "export"), "--tasks", "local_sums", "--include_path", str(tmp_path), "--limit", "5"]
    assert main([*argv, "--output_dir", str(tmp_path)]) == 0
    [result] = json.loads((tmp_path / "evaluation.json").read_text())["results"]
    assert (result["measure"], result["samples"], result["higher_is_better"]) == ("local_sums acc", 5, True)
    accuracy = result["value"]
    assert result["stderr"] == pytest.approx(math.sqrt(accuracy * (1 - accuracy) / 4))


def test_exports_of_a_run_on_a_stream_are_found(run, tmp_path):
    copied = shutil.copytree(run, tmp_path / "run")
    settings = json.loads((copied / "settings.json").read_text()) | {"streaming": True, "max_steps": 10}
    (copied / "settings.json").write_text(json.dumps(settings))
    targets = find_targets([str(copied)], {})
    assert targets and all(target.cfg.data.streaming for target in targets)


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ("{tmp}/nothing --dataset_name demo", "{tmp}/nothing: there is no such folder"),
        ("{run} {tmp}", "{tmp}: not a run folder (it has no settings.json)"),
        ("{run}-bare", "{run}-bare: has no export; make it: python train_fp8.py --config {run}-bare/"),
        ("{run} {parent}", "{run}-bare: has no export"),
        ("{base}", "--tasks loss,exact_match: no run is given; add --dataset_name"),
        ("{run} --max_new_tokens 0", "--max_new_tokens 0: must be at least 1"),
        ("{run} --limits 3", "unknown flag --limits; did you mean '--limit'?"),
        ("{run} --eval_split nope", "--eval_split nope: no such split"),
        ("{run} --tasks exact_match --dataset_name {tmp}/chat.jsonl", "--dataset_name {tmp}/chat.jsonl: its"),
        (
            "{base}-damaged --dataset_name {tmp}/chat.jsonl",
            "{base}-damaged: transformers cannot load it (1 w",
        ),
        ("{run} --tasks no_such_task", "--tasks no_such_task: "),
    ],
)
def test_bad_input_is_one_line(run, tmp_path, capsys, argv, error):
    names = {"tmp": tmp_path, "run": run, "base": run.parent / "base", "parent": run.parent}
    (tmp_path / "chat.jsonl").write_text('{"prompt": "a", "response": "in 1990"}\n')
    bare, damaged = run.with_name("run-bare"), run.parent / "base-damaged"
    if not damaged.exists():
        write_run(bare)
        shutil.copytree(run.parent / "base", damaged)
        weights = load_file(damaged / "model.safetensors")
        del weights["model.norm.weight"]
        save_file(weights, damaged / "model.safetensors", {"format": "pt"})
    assert main(argv.format(**names).split()) in (1, 2)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith("error: " + error.format(**names)), errors


def test_runs_on_different_data_are_refused_by_flag(run, tmp_path):
    settings = json.loads((run / "settings.json").read_text())
    shutil.copytree(run, tmp_path / "run")

    def targets(**changes):
        (tmp_path / "run/settings.json").write_text(json.dumps(settings | changes))
        return find_targets([str(run), str(tmp_path / "run")], {})

    assert len(targets(num_workers=0, num_of_samples=3)) == 4, "the evaluated rows are the same"
    with pytest.raises(UserError, match=r"different data \(--max_seq_length\)"):
        targets(max_seq_length=128)
    with pytest.raises(UserError, match=r"different data \(--packing\); evaluate each alone"):
        targets(packing=False)


def test_results_join_the_verdict_over_seeds(tmp_path):
    def finished(name, steps=10, evaluated_at=10, **rights):
        folder = write_run(tmp_path / name, losses=[1.0] * 10, summary={"steps": steps})
        results = []
        for export, right in rights.items():
            scores = "1" * right + "0" * (5000 - right)
            share = right / 5000
            results.append(Result("exact_match", share, 0.01, 5000, "rows", scores=scores, export=export))
        write_results(folder, results, steps=evaluated_at)
        return read_run(folder)

    baselines = [finished(f"bf16-{i}", export=right) for i, right in enumerate((3000, 3050, 3100))]
    runs = [finished(f"fp8-{i}", export=n, export_fp8=n - 100) for i, n in enumerate((3001, 3050, 3102))]
    judged = judge_evaluated(list(zip(runs, baselines, strict=True)), 0.5)
    assert {name: (j.verdict, j.mean) for name, j in judged.items()} == {
        "exact_match of export": ("PASS", pytest.approx(-0.02)),
        "exact_match of export_fp8": ("FAIL", pytest.approx(1.98)),  # against the BF16 export
    }
    trained_further = finished("more", steps=20, export=100)
    assert judge_evaluated([(trained_further, baselines[0])], 0.5) == {}


def test_equal_accuracies_of_few_samples_decide_nothing():
    none_right = Result("exact_match", 0.0, 0.05, 20, "rows", scores="0" * 20)
    again = replace(none_right, model="other")
    assert again.difference(none_right) == (0, pytest.approx(math.sqrt(1 / 22 / 20)))
    pair = [
        RunRecord(Path(name), {}, {}, [], {}, evaluation=[replace(again, export="export")])
        for name in ("run", "baseline")
    ]
    judgement = judge_evaluated([pair] * 3, 0.5)["exact_match of export"]
    assert judgement.verdict == "INCONCLUSIVE" and judgement.bounds[1] == pytest.approx(7.84, abs=0.01)
