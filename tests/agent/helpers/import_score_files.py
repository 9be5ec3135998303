"""Small files of evaluation tools, in their layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

MOMENT = "2026-01-02T03-04-05.678901"
BEGIN = 1_767_323_045.0
"""That moment in seconds since 1970, as a fixed time for all files."""


def write_lm_eval(
    folder: Path,
    model: str = "runs/gpt/checkpoint-200",
    correct: Callable[[int], bool] = lambda item: item % 3 > 0,
) -> Path:
    """Results of version 0.4 with a group, two filters, 'N/A', and the samples of two tasks."""
    below = folder / "out" / model.replace("/", "__")
    below.mkdir(parents=True)
    share = sum(correct(item) for item in range(60)) / 60
    results: dict[str, Any] = {
        "toy": {"alias": "toy", "acc,none": share, "acc_stderr,none": 0.06, "word_perplexity,none": 12.5},
        "gsm": {
            "alias": "gsm",
            "exact_match,strict-match": 0.5,
            "exact_match_stderr,strict-match": "N/A",
            "exact_match,flexible": 0.75,
        },
        "all": {"alias": "all", "acc,none": share, "acc_stderr,none": "N/A"},
    }
    document = {
        "results": results,
        "groups": {"all": results["all"]},
        "group_subtasks": {"all": ["toy"]},
        "versions": {"toy": 1.0},
        "n-shot": {"toy": 0},
        "higher_is_better": {"toy": {"acc": True, "word_perplexity": False}, "gsm": {"exact_match": True}},
        "config": {"model": "hf", "model_args": f"pretrained={model},dtype=bfloat16"},
        "date": BEGIN,
        "model_name": model,
        "lm_eval_version": "0.4.9",
    }
    path = below / f"results_{MOMENT}.json"
    path.write_text(json.dumps(document, indent=2))
    samples = [
        {
            **_sample(item, "none", ["acc", "word_perplexity"]),
            "acc": float(correct(item)),
            "word_perplexity": [-12.5, 4],
        }
        for item in range(60)
    ]
    (below / f"samples_toy_{MOMENT}.jsonl").write_text(
        "".join(json.dumps(sample) + "\n" for sample in samples)
    )
    samples = [
        {**_sample(item, name, ["exact_match"]), "exact_match": float(item % 4 < limit)}
        for name, limit in (("strict-match", 2), ("flexible", 3))
        for item in range(40)
    ]
    (below / f"samples_gsm_{MOMENT}.jsonl").write_text(
        "".join(json.dumps(sample) + "\n" for sample in samples)
    )
    return path


def _sample(item: int, filter_name: str, metrics: list[str]) -> dict[str, Any]:
    return {
        "doc_id": item,
        "doc": {"question": f"{item}?"},
        "target": "1",
        "arguments": {"gen_args_0": {"arg_0": "?"}},
        "resps": [["1"]],
        "filtered_resps": ["1"],
        "filter": filter_name,
        "metrics": metrics,
        "doc_hash": f"{item:064x}",
        "prompt_hash": f"{item:064x}",
        "target_hash": f"{item:064x}",
    }


def write_flat_lm_eval(folder: Path) -> Path:
    """Results of version 0.3."""
    path = folder / "flat.json"
    document = {
        "results": {"hellaswag": {"acc": 0.5, "acc_stderr": 0.01, "acc_norm": 0.6, "acc_norm_stderr": 0.01}},
        "versions": {"hellaswag": 0},
        "config": {"model": "gpt2", "model_args": "pretrained=runs/gpt-fp8/step_4000", "num_fewshot": 0},
    }
    path.write_text(json.dumps(document, indent=2))
    return path


def write_lighteval(folder: Path, model: str = "org/gpt-bf16", items: int = 30) -> Path:
    """Results and details of two tasks."""
    results = folder / "results" / model
    details = folder / "details" / model / MOMENT
    results.mkdir(parents=True)
    details.mkdir(parents=True)
    rows = [
        {
            "doc": {"query": f"{item}?", "id": str(item)},
            "metric": {"acc": float(item % 2), "f1": item / items},
            "model_response": {"text": ["a"]},
        }
        for item in range(items)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), details / f"details_toy|0_{MOMENT}.parquet")
    document = {
        "config_general": {
            "lighteval_sha": "?",
            "model_config": {"model_name": model, "dtype": "bfloat16"},
            "model_name": model,
        },
        "results": {"toy|0": {"acc": 0.5, "acc_stderr": 0.09}, "all": {"acc": 0.5, "acc_stderr": 0.09}},
        "versions": {"toy|0": 0},
        "config_tasks": {},
        "summary_tasks": {},
        "summary_general": {},
    }
    path = results / f"results_{MOMENT}.json"
    path.write_text(json.dumps(document, indent=2))
    return path


def write_opencompass(folder: Path) -> Path:
    """A summary of two models, and the results of items of one."""
    (folder / "summary").mkdir()
    path = folder / "summary" / "summary_20260102_030405.csv"
    path.write_text(
        "dataset,version,metric,mode,gpt-bf16_hf,gpt-fp8_hf\n"
        "--------- exams ---------,-,-,-,-,-\n"
        "ceval,abcdef,accuracy,gen,50.00,25.00\n"
        "mmlu,-,naive_average,gen,60.10,-\n"
    )
    for model, limit in (("gpt-bf16_hf", 2), ("gpt-fp8_hf", 1)):
        (folder / "results" / model).mkdir(parents=True)
        details: dict[str, Any] = {"type": "GEN"}
        details |= {
            str(item): {"pred": "a", "answer": "a", "correct": item % 4 < limit} for item in range(40)
        }
        document = {"accuracy": 25.0 * limit, "details": details}
        (folder / "results" / model / "ceval.json").write_text(json.dumps(document))
    return path
