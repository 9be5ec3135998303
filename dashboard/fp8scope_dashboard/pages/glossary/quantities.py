"""Terms about costs and savings of a run against its baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fp8scope_dashboard.pages.glossary.term import Term

QUANTITY_TERMS: Final[Mapping[str, Term]] = {
    "net_speed": Term(
        "Speed to the same loss",
        "How many times faster the run reaches the baseline's loss: the throughput ratio divided by 1 + the "
        "share of additional tokens.",
    ),
    "throughput_ratio": Term(
        "Throughput",
        "Tokens per second relative to the baseline. Each run counts with its typical step: pauses for "
        "checkpoints, evaluations and sampled statistics do not count, nor do its first steps.",
    ),
    "tokens_cost": Term(
        "Cost in tokens",
        "How many more tokens the run needs for the baseline's loss: the difference of the losses over the "
        "slope of the baseline's loss in the last third of the common range.",
        "A level loss has no slope, so the cost is not known. The page says so.",
    ),
    "time_to_loss": Term(
        "Time to the same loss",
        "How long the run and its baseline trained until their smoothed loss was at the same value, and how "
        "many times sooner the run was there. The value is the highest of the losses that the runs have in "
        "the middle of their last third.",
        "Pauses within steps count, the time between two starts of the training does not.",
    ),
    "memory_ratio": Term("Memory", "The peak of the GPU memory in use, relative to the baseline's."),
    "energy_ratio": Term(
        "Energy per token",
        "The power of the GPU over the tokens per second in typical steps, relative to the baseline. Of the "
        "GPU of rank 0, without the host.",
    ),
    "gpu_hours": Term(
        "GPU hours",
        "The time of every process of a run, from its start to its end or its last sign of life, added up. A "
        "process is taken for one GPU.",
        "Where fewer processes write than the run has (WORLD_SIZE), those that write stand for all.",
    ),
    "process_hours": Term(
        "Process hours",
        "The time of every process of a run that has told of no GPU, from its start to its end or its last "
        "sign of life, added up.",
    ),
    "cost": Term(
        "Cost",
        "GPU hours times the price of one, which the settings of the project have. It has the currency of "
        "that price.",
    ),
    "hours_lost": Term(
        "Hours lost",
        "Divergences count from the onset of an alert of the loss until it was resolved, or to the end. "
        "Crashes count from the last checkpoint, or from the step at which a later start went on. Waiting "
        "for data is the share of time_data in the steps of the runs with the most hours.",
        "Steps become hours by the mean pace of their run. Nothing is counted twice.",
    ),
    "hours_saved": Term(
        "Hours saved",
        "What the baseline would have needed beyond the hours of an FP8 run: these times the speed to the "
        "same loss, or the throughput ratio, less 1. Runs without a comparison do not count.",
    ),
    "gradient_norm_delta": Term(
        "Gradient norm",
        "Relative difference of the geometric means of the gradient norm in the last third of the common "
        "range.",
    ),
}
