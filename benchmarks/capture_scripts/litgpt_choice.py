"""litgpt's pre-training with `--logger_name fp8scope`, which `fp8scope run` makes a choice of litgpt's."""

import json
import sys

from litgpt.__main__ import main

from fp8scope.integrations.fabric import Fp8scopeLogger

record = Fp8scopeLogger.log_metrics


def log_metrics(logger, metrics, step=None):
    with open("logged.jsonl", "a") as file:
        for name, value in metrics.items():
            file.write(json.dumps(["lightning", name, step, float(value)]) + "\n")
    record(logger, metrics, step)


Fp8scopeLogger.log_metrics = log_metrics  # type: ignore[method-assign]
OPTIONS = {
    "--data": "random_tokens.RandomTokens",
    "--logger_name": "fp8scope",
    "--out_dir": "out",
    "--devices": "1",
    "--precision": "32-true",
    "--train.max_seq_length": "16",
    "--train.global_batch_size": "8",
    "--train.micro_batch_size": "4",
    "--train.max_tokens": "1024",
    "--train.log_interval": "1",
    "--eval.interval": "3",
    "--eval.max_iters": "2",
}
sys.argv = ["litgpt", "pretrain", "pythia-14m", *(word for option in OPTIONS.items() for word in option)]
main()
