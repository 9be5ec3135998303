"""Terms about whole runs: verdicts, evaluations, commands, alerts, ranks and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fp8scope_dashboard.pages.glossary.term import Term

RUN_TERMS: Final[Mapping[str, Term]] = {
    "verdict": Term(
        "Verdict",
        "Compares the loss at the end of the common range with the baseline group: equivalent, worse, "
        "better, or cannot tell yet. With two or more runs on each side: an equivalence test (two "
        "one-sided t-tests over seeds) against the project's margin. With one run: an interval that stays "
        "valid however often "
        "you look, against the tolerance.",
        "Cannot tell yet: the interval reaches across the limit; the text says how many more steps or seeds "
        "would decide. Incomplete: the compared steps show no harm, but the run or its baseline failed, went "
        "silent or stopped before the planned end.",
    ),
    "onset_strip": Term(
        "What happened",
        "Alerts, the finding of the diagnosis, the step from which the comparison lies outside its "
        "tolerance, the first loss that is not finite, changes of precision, commands, restarts and a bad "
        "end, in the order in which they began. A range, such as 231–240, means that the tensor was not "
        "observed in each step, or not judged: it begins in one of these steps. Alerts, messages, diagnosis "
        "and ranking name the same steps.",
        "A click shows the steps around it in the charts below. That one thing begins before another does "
        "not show that it is its cause; the diagnosis looks at that.",
    ),
    "tensors_out_of_range": Term(
        "Tensors out of range",
        "Of the tensors observed in the steps of a column: those whose overflow rate or underflow rate "
        "reaches the limit of the project's rule in at least one of these steps.",
    ),
    "delta": Term(
        "Delta",
        "Relative difference of the loss: (FP8 − BF16) / |BF16|, aligned on tokens if both runs log them, "
        "else on steps. Above zero, FP8 is worse.",
        "The shaded band is the anytime-valid interval of this pair of runs at each point: what a look there "
        "would have shown. It narrows as the run goes on, and does not include variation over seeds.",
    ),
    "tolerance": Term(
        "Tolerance",
        "The larger of the project's margin and the difference that two seeds of one configuration rarely "
        "exceed. The spread between seeds comes from the baseline's seeds, the project's other groups and "
        "public runs: few seeds of your own are not helpless.",
    ),
    "margin": Term(
        "Margin",
        "The relative difference of the loss below which FP8 and BF16 count as equivalent. Set per project.",
    ),
    "score": Term(
        "Score",
        "The mean over an evaluation's items. The whisker is a confidence interval over items (Wilson for "
        "proportions); the blue band is the range of a further BF16 seed (Student-t over seeds), or the "
        "interval of the BF16 run if there is only one.",
        "A score inside the band is no proof that there is no harm: the verdict uses the paired difference.",
    ),
    "score_verdict": Term(
        "Verdict on scores",
        "From the difference over the same items and the spread between seeds. Equivalent: its interval is "
        "inside the margin. Worse or better: different beyond chance, adjusted for the number of tasks "
        "(Holm). Cannot tell yet: neither; the text says how many items or seeds would do.",
    ),
    "evaluation_matrix": Term(
        "One checkpoint in several precisions",
        "The same weights, rounded to other formats and evaluated on the same items. Differences are paired "
        "with BF16, without a spread between seeds: a verdict is about this checkpoint. All cells share the "
        "error. Bytes are those of the packed weights of the quantised layers; seconds are those of the "
        "evaluation on the machine that ran it.",
    ),
    "margin_of_score": Term(
        "Margin of a score",
        "The largest difference that counts as none: one percentage point (pp) for accuracies, the project's "
        "margin for losses, 1 % of BF16's score for other metrics; or margin= in run.log_eval.",
    ),
    "detectable": Term(
        "Smallest detectable",
        "The smallest true harm that a test with this many items and seeds detects with 80 % "
        "probability. Smaller harms may exist undetected.",
    ),
    "signal_to_noise": Term(
        "Signal to noise",
        "BF16's score over the standard deviation between seeds: own seeds, or the published spread of the "
        "benchmark. Evaluations with a small ratio say little about one run.",
    ),
    "monotonicity": Term(
        "Monotonicity",
        "Kendall's tau between checkpoint and score: 1 if every checkpoint is better than the one before, "
        "near 0 if the score does not follow the training. It needs three checkpoints.",
    ),
    "roles": Term(
        "Roles",
        "A viewer reads everything. A member also creates tokens and reports, answers alerts, sends "
        "commands, and deletes runs, tokens and reports of their own. An administrator also changes rules, "
        "members, channels, margins and storage, and what other people made.",
        "A project keeps at least one administrator.",
    ),
    "file_import": Term(
        "Import files",
        "The server reads the files in a process with limits of memory and time, and sends them to itself as "
        "an agent would. A token of this project works for that process alone, while it runs.",
        "Runs are known by their ids, or by the name and the first lines of their file: a file that has "
        "grown adds to its run.",
    ),
    "shared_report": Term(
        "Report",
        "Charts, verdicts and text as they were when the report was made. It does not change when runs go on "
        "or are deleted.",
        "A link shows one report to everybody who has it, without an account and without anything else of "
        "this server, until it expires or is revoked.",
    ),
    "reference_window": Term(
        "Reference window",
        "A few steps trained twice from the same state, with the same batches and random numbers: in FP8 "
        "and in BF16. The run then continues from the FP8 steps as if there had been no window.",
        "It measures the cost of FP8 from this step on. The cost of earlier steps is in both curves.",
    ),
    "window_delta": Term(
        "FP8 − BF16",
        "Relative difference of the mean loss over the window. ± is the standard error of the paired "
        "difference within this window; it does not predict other windows.",
        "Over: the difference exceeds the project's margin or is not finite.",
    ),
    "incident": Term(
        "Incident",
        "The last steps in full, kept on the training machine when a critical alert arrives or the run "
        "fails: statistics of all tensors, batches by hash, random state, and snapshots if the script allows "
        "them.",
        "A replay trains one of these steps again and names the product in which FP8 and BF16 diverge.",
    ),
    "bisection": Term(
        "Bisection",
        "For each matrix product in turn: the gradient g of one batch with this product in FP8 and all "
        "others in BF16, compared with the gradient r with all products in BF16. Shows the relative error "
        "|g − r| / |r| and the cosine.",
    ),
    "product": Term(
        "Product",
        "A linear layer has three matrix products: fprop, input by weight; dgrad, output gradient by weight; "
        "wgrad, output gradient by input.",
    ),
    "fallback": Term(
        "Fallback",
        "The named layers compute in BF16 from the next step on, until they are set to FP8 again. A name "
        "may contain * for any characters, as in blocks.*.mlp.down. The loss chart marks every change.",
    ),
    "command": Term(
        "Command",
        "A request of a user or a rule to the training process. The process receives it with the response "
        "to its next message and carries it out between two steps. The training script decides which "
        "commands it accepts.",
        "Delivered: sent to the process, no result yet. A command expires after 15 minutes without a result.",
    ),
    "alert": Term(
        "Alert",
        "One event for one condition. It opens at the step at which a rule detects the condition and closes "
        "when the condition ends. Onset is the condition's first step.",
    ),
    "alpha": Term(
        "Alpha",
        "Probability of a false alarm over a whole run, and one minus the confidence level of the intervals.",
    ),
    "baseline": Term(
        "Baseline",
        "The group of runs, usually in BF16, or the single run that this run is compared with. The training "
        "script names it, or a member of the project chooses it here; a choice on the page wins until it is "
        "undone. A suggestion is a run with the same configuration but for precision, recipe, seed, names, "
        "paths and times. It is never used unless someone accepts it.",
    ),
    "seed_group": Term(
        "Seed group",
        "Runs that differ only in their seed. Their spread shows how far two runs differ by chance.",
    ),
    "rank": Term(
        "Rank",
        "One process of a run that trains on several devices. The charts show the sum of all ranks' counts "
        "and the largest amax; this table shows each rank.",
        "Behind: steps behind the rank with the most stored steps. Not reporting: nothing received for a "
        "minute, or no final message when the run ended; the process was killed or lost its connection.",
    ),
    "attempt": Term(
        "Attempt",
        "Resuming a run, or going back to an earlier step, begins a new attempt. From its first step on it "
        "replaces the data of earlier attempts, which stays stored but is not drawn.",
    ),
    "points": Term(
        "Points stored",
        "Number of values committed to the database: a scalar or one statistic of one tensor at one step. "
        "Dropped: steps that the agent could neither send nor write to disk.",
    ),
    "token": Term(
        "API token",
        "Authenticates a training process for a project. It is shown once; only its hash is stored. Requests "
        "with a revoked token are refused.",
    ),
    "channel": Term(
        "Alert channel",
        "Each alert is sent to the project's channels until they accept it. E-mails and most chats contain a "
        "chart. Webhooks get JSON by POST, signed with HMAC-SHA256 of the secret. Every attempt has the same "
        "key, so that receivers can drop duplicates.",
    ),
}
