"""The evaluation matrix of a small model: what each precision costs in quality, bytes and seconds.

    python benchmarks/evaluation_matrix.py [--steps N] [--windows N]

Trains a small byte-level GPT in float32 on the demo's text, then evaluates it in every precision on two
tasks: the loss of each held-out window in nats per byte, and whether its last byte is right. Every cell is
judged by the server's code. Prints one JSON line per task and precision:

    score, difference, interval, interval_level, margin, verdict    the difference is paired with BF16's
    weight_bytes, of_bf16    packed weights of the quantised layers, with scales; and their share of BF16's
    seconds, speed           of the evaluation, and BF16's seconds over them (below 1: slower)

and last one line for the whole: layers quantised and left, and whether the model was bit-equal afterwards.
"""

import argparse
import json

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8scope.demo.data import load
from fp8scope.demo.model import ByteGpt, Shape
from fp8scope.evaluation.matrix import EvaluationMatrix, evaluate_matrix
from fp8scope.evaluation.scores import ItemScores, TaskResult
from fp8scope_dashboard.analysis.scores.result import RunScore, ScoreComparison, TaskScores
from fp8scope_dashboard.analysis.scores.verdict import judge

ALPHA = 0.05
BATCH = 16


def trained(steps: int, context: int) -> ByteGpt:
    torch.manual_seed(0)
    corpus = load(context, 1)
    model = ByteGpt(Shape(context=context))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        text = corpus.batch(step, BATCH)
        logits = model(text[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return model


def task_of(result: TaskResult, reference: TaskResult) -> TaskScores:
    def score(of: TaskResult) -> RunScore:
        return RunScore(np.array(of.items), of.item_ids, of.clusters)

    return TaskScores(
        name=result.name,
        metric=result.metric,
        kind=result.kind,
        higher_is_better=result.higher_is_better,
        arm=[score(result)],
        baselines=[score(reference)],
        margin=result.margin,
        same_weights=True,
    )


def judged(matrix: EvaluationMatrix) -> dict[tuple[str, str], ScoreComparison]:
    """The verdict on each cell by precision and task, as the server gives it."""
    cells = {
        (column.precision, task): task_of(result, matrix.reference.scores[task])
        for column in matrix.columns[1:]
        for task, result in column.scores.items()
    }
    return dict(zip(cells, judge(list(cells.values()), alpha=ALPHA), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--windows", type=int, default=576)
    options = parser.parse_args()
    corpus = load(64, options.windows)
    model = trained(options.steps, 64)

    def evaluate(model: nn.Module) -> dict[str, ItemScores]:
        losses, right = [], []
        for windows in corpus.windows.long().split(BATCH):  # type: ignore[no-untyped-call]
            logits: Tensor = model(windows[:, :-1]).float()
            losses.append(
                functional.cross_entropy(logits.transpose(1, 2), windows[:, 1:], reduction="none").mean(1)
            )
            right.append(logits[:, -1].argmax(1) == windows[:, -1])
        return {
            "held-out text": ItemScores(
                items=torch.cat(losses),
                item_ids=corpus.items,
                clusters=corpus.clusters,
                metric="nll",
                higher_is_better=False,
            ),
            "last byte": ItemScores(
                items=torch.cat(right), item_ids=corpus.items, clusters=corpus.clusters, metric="accuracy"
            ),
        }

    before = [tensor.detach().clone() for tensor in model.state_dict().values()]
    matrix = evaluate_matrix(model, evaluate)
    after = list(model.state_dict().values())
    verdicts = judged(matrix)
    reference = matrix.reference
    for column in matrix.columns:
        for task, result in column.scores.items():
            line = {
                "precision": column.precision,
                "task": task,
                "metric": result.metric,
                "score": round(result.mean, 5),
            }
            if (column.precision, task) in verdicts:
                verdict = verdicts[column.precision, task]
                line |= {
                    "difference": verdict.difference,
                    "interval": verdict.difference_interval,
                    "interval_level": verdict.interval_level,
                    "margin": verdict.margin,
                    "verdict": verdict.verdict,
                }
            print(
                json.dumps(
                    {
                        **line,
                        "weight_bytes": column.weight_bytes,
                        "of_bf16": round(column.weight_bytes / reference.weight_bytes, 4),
                        "seconds": round(column.seconds, 3),
                        "speed": round(reference.seconds / column.seconds, 3),
                    }
                )
            )
    print(
        json.dumps(
            {
                "layers": len(matrix.plan.layers),
                "left": {group.reason: group.modules for group in matrix.plan.left},
                "errors": matrix.errors,
                "repeatable": matrix.repeatable,
                "bit_equal_afterwards": all(map(torch.equal, before, after)),
            }
        )
    )


if __name__ == "__main__":
    main()
