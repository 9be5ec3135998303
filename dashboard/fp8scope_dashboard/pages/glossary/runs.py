"""What runs are compared by, asked to do and watched for, and what comes with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fp8scope_dashboard.pages.glossary.term import Term

RUN_TERMS: Final[Mapping[str, Term]] = {
    "verdict": Term(
        "Verdict",
        "The loss in the final tenth of the common range, held against the baseline group. With two or "
        "more runs in each arm: a test of equivalence (two one-sided t-tests over seeds) against the "
        "project's margin. With one FP8 run: within or over the tolerance, without a p-value.",
        "Inconclusive means: these seeds cannot tell. More seeds would. Incomplete: nothing is wrong in "
        "the steps that were compared, but they are not all of the planned run, because the run or its "
        "baseline failed, went silent or stopped early.",
    ),
    "delta": Term(
        "Delta",
        "Relative difference of the loss: (FP8 − BF16) / |BF16|, aligned on tokens where both runs carry "
        "them, else on steps. Above zero, FP8 is worse.",
        "The shaded band is noise within this pair of runs only. It says nothing about another seed.",
    ),
    "tolerance": Term(
        "Tolerance",
        "The larger of the project's margin and 3 s √(1 + 1/K), with s the standard deviation of K ≥ 3 "
        "baseline seeds: what another BF16 seed could have done by chance.",
    ),
    "margin": Term(
        "Margin",
        "The relative difference of the loss below which FP8 and BF16 count as equivalent. Set per project.",
    ),
    "score": Term(
        "Score",
        "The mean over an evaluation's items. The whisker is a confidence interval over items (Wilson for "
        "proportions); the blue band is where a further BF16 seed would fall (Student-t over seeds), or "
        "the interval of the one BF16 run.",
    ),
    "detectable": Term(
        "Smallest detectable",
        "The smallest true difference that this many items and seeds would have shown with 80 % "
        "probability. Differences below it may exist unseen.",
    ),
    "reference_window": Term(
        "Reference window",
        "Some steps that the run trained in FP8 and, from the same state, on the same batches and with the "
        "same random numbers, in BF16 as well. The run itself goes on as if nothing had been.",
        "It shows what FP8 costs from here on. What it has cost before is in both curves.",
    ),
    "window_delta": Term(
        "FP8 − BF16",
        "Relative difference of the mean loss over the window. ± is the standard error of the paired "
        "difference: how even it is within this window, and nothing about another one.",
        "Over: beyond the project's margin, or not finite.",
    ),
    "bisection": Term(
        "Bisection",
        "The gradient of one batch with a single matrix product in FP8 and all others in BF16, against all "
        "in BF16: relative error |g − r| / |r| and cosine of the whole gradient, for each product in turn.",
    ),
    "product": Term(
        "Product",
        "A linear layer multiplies three times: fprop, input by weight; dgrad, the output's gradient by "
        "weight; wgrad, the output's gradient by input.",
    ),
    "fallback": Term(
        "Fall back",
        "The named layers compute in BF16 from the next step on, and in FP8 again when asked to. A name may "
        "hold * for any characters, as in blocks.*.mlp.down. Every change is marked in the loss.",
    ),
    "command": Term(
        "Command",
        "What a person or a rule asks of the training process. It travels with the answer to its next "
        "message, is done between two steps, and what became of it is shown. The training script decides "
        "what it takes.",
        "Delivered means: on its way into the process. After 15 minutes without an answer it expires.",
    ),
    "alert": Term(
        "Alert",
        "One event for one condition: opened at the step where a rule was sure, closed when the condition "
        "is gone. Onset is the first step of it.",
    ),
    "alpha": Term(
        "Alpha",
        "Probability of a false alarm over a whole run, and one minus the level of the intervals.",
    ),
    "rank": Term(
        "Rank",
        "One process of a run that trains on several devices. Counts of the ranks are added and amaxes are "
        "the largest of them; here each is seen by itself.",
        "Behind is counted from the rank that has stored the most steps. A rank that is not heard of for a "
        "minute was killed or is cut off; when the run has ended, so was one that never said so.",
    ),
    "attempt": Term(
        "Attempt",
        "A run that is resumed, or that goes back to an earlier step, begins another attempt. From its first "
        "step on it replaces what earlier ones had stored; that is kept, and left out of the charts.",
    ),
    "points": Term(
        "Points stored",
        "Single values (a scalar or one tensor's statistic at one step) committed to the database. "
        "Dropped are rows that the agent could neither send nor keep on disk; it counts them.",
    ),
    "token": Term(
        "API token",
        "What a training process proves its project with. Shown once; only a hash is kept. Revoking it "
        "stops the next request.",
    ),
    "webhook": Term(
        "Webhook",
        "Each alert is sent as JSON by POST to this address, signed with HMAC-SHA256 of the secret, and "
        "repeated until the other side answers 2xx.",
    ),
}
