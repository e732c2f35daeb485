"""Tasks of lm-eval's harness, https://github.com/EleutherAI/lm-evaluation-harness."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fp8_suite.benchmarks.records.evaluation import Result
from fp8_suite.core.errors import bad_setting
from fp8_suite.core.settings import nearest


def find_tasks(names: list[str], include_path: Path | None) -> Any:
    """Return lm-eval's manager of its tasks and those in `include_path`. UserError if one is unknown."""
    if find_spec("lm_eval") is None:
        reason = "these are tasks of lm-eval, which is missing; install: pip install lm_eval"
        raise bad_setting(reason, tasks=",".join(names))
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path)
    for name in set(names) - set(manager.all_tasks):
        raise bad_setting(f"unknown task{nearest(name, manager.all_tasks)}", tasks=name)
    return manager


def run_tasks(names: list[str], manager: Any, model: Any, tokenizer: Any, **options: Any) -> list[Result]:
    """Return the metrics of tasks and groups; those of a tag are its tasks'."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=options.pop("batch_size"))
    output = simple_evaluate(wrapped, tasks=names, task_manager=manager, log_samples=False, **options)
    has_tags, results = not set(names) <= output["results"].keys(), []
    for name, metrics in output["results"].items():
        data = f"version {output['versions'].get(name)}, {output['n-shot'].get(name)} shots, {options}"
        for key, value in metrics.items():  # `metric,filter` and `metric_stderr,filter`
            metric, comma, variant = key.partition(",")
            if comma and not metric.endswith("_stderr") and (name in names or has_tags):
                measure = f"{name} {metric}" + f" ({variant})" * (variant != "none")
                better = output["higher_is_better"].get(name, {}).get(metric) is not False
                error = metrics.get(f"{metric}_stderr,{variant}")
                error = float(error) if isinstance(error, float) else None  # "N/A"
                results.append(Result(measure, float(value), error, metrics["sample_len"], data, better))
    return results
