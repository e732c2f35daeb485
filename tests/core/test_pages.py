"""README and docs: links resolve, flags, files and symbols exist, and training commands parse."""

import re
import shlex

import pytest
from fp8_suite.core.packages import ROOT
from fp8_suite.training.config import all_settings, parse_config

CURRENT = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*CURRENT, ROOT / "CHANGELOG.md"]  # which names removed flags
TORCHRUN = {"nproc_per_node", "nnodes", "max_restarts", "rdzv_backend", "rdzv_endpoint", "rdzv_id"}
OTHERS = {"config", "help", "flag", "no"}
# Flags that only --help explains: their meaning is that of AdamW, of TE or of PyTorch's data loader.
HELP_ALONE = {
    *("adam_beta1", "adam_epsilon", "eval_batch_size", "num_workers"),
    "fp8_format",
}
DEVELOPMENT = (ROOT / "docs/development.md").read_text(encoding="utf-8")
FOLDERS = "benchmarks|configs|core|data|docs|ds_configs|te_models|tests|training"


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page):
    links = re.findall(r"\]\((?!http)([^)]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def flags_of(page):
    return set(re.findall(r"(?<![\w-])--([a-z][a-z0-9_]*)", page.read_text(encoding="utf-8")))


def test_each_flag_is_in_the_docs_or_left_to_help():
    named = {flag for page in CURRENT[1:] for flag in flags_of(page)}
    assert {name for name in all_settings() if not {name, f"no_{name}"} & named} == HELP_ALONE


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)
def test_files_of_the_suite_exist(page):
    names = re.findall(rf"`((?:{FOLDERS})/[\w./]*)`", page.read_text(encoding="utf-8"))
    if page.name == "development.md":
        names += re.findall(r"`([\w/]+\.py)`", DEVELOPMENT)
    assert not [name for name in names if not (ROOT / name).exists()]


@pytest.mark.parametrize(
    ("symbols", "path"), re.findall(r"((?:`\w+`(?:, | and )?)+)\s+in `([\w/]+\.py)`", DEVELOPMENT)
)
def test_symbols_that_development_names_are_in_their_file(symbols, path):
    source = (ROOT / path).read_text(encoding="utf-8")
    for symbol in re.findall(r"`(\w+)`", symbols):
        assert re.search(rf"^\s*((def|class) {symbol}\b|{symbol}\b(: [^=]+)? =)", source, re.M), symbol


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)
def test_flags_exist(page):
    programs = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "training/doctor").glob("*.py")]
    programs.append(ROOT / "training/export/quantize.py")
    options = {flag for path in programs for flag in re.findall(r'"(?:--)?([a-z0-9_]+)"', path.read_text())}
    settings = set(all_settings())
    known = settings | {f"no_{name}" for name in settings} | options | TORCHRUN | OTHERS
    assert flags_of(page) <= known


def commands() -> list[str]:
    """Training commands in docs, and those users already run; tests/test_readme.py runs the README's."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in CURRENT[1:])
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    commands_in_docs = [line for line in lines if re.search(r"\b(python3?|torchrun) .*train_\w+\.py", line)]
    commands_in_docs = [line for line in commands_in_docs if "$" not in line]  # shell variables
    common = (
        "python train_fp8.py --dataset_name nvidia/OpenMathInstruct-2 --use_wandb --wandb_project llm-fp8 "
        "--wandb_run_name run --max_seq_length 1024 --num_epochs 1 --model_name "
    )
    llama = "meta-llama/Llama-3.2-3B --batch_size 12 --split_name"
    return [
        *commands_in_docs,
        f"{common} {llama} train_1M --mixed_precision fp8 --use_te",
        f"{common} {llama} validation --mixed_precision fp8 --use_te --fp8_scenario mxfp8",
        f"{common} {llama} train_1M --mixed_precision bf16",
        f"{common} Qwen/Qwen2.5-14B --batch_size 4 --split_name train_1M --mixed_precision fp8",
    ]


def parsed(command):
    words = shlex.split(command, comments=True)
    script = next(i for i, word in enumerate(words) if word.endswith(".py"))
    assert (ROOT / words[script]).exists()
    flags = words[script + 1 :]
    if "--config" in flags and not (ROOT / flags[flags.index("--config") + 1]).exists():
        pytest.skip("names a file of the user's own")
    return None if "--help" in flags else parse_config(flags, prog=words[script], description="")


@pytest.mark.parametrize("command", commands())
def test_training_commands_parse(command):
    parsed(command)


def test_flags_for_other_models_parse():
    readme, page = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/models.md"))
    command = re.search(r"^```\n(python train_fp8.py --model_name .*?)^```", readme, re.MULTILINE | re.DOTALL)
    command = command[1].replace("\\\n", "")
    rows = re.findall(r"^\| (.*?) \| `(--model_name .*?)` \|$", page, re.MULTILINE)
    assert len(rows) == 6
    for kind, flags in rows:
        layers = " --no_use_te" if "without `--use_te`" in kind else ""
        cfg = parsed(f"{command} {flags}{layers}")
        assert f"--model_name {cfg.model.model_name}" in flags and cfg.model.use_te == (not layers)
