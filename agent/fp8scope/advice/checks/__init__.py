"""The checks, one a practice."""

from fp8scope.advice.checks.arithmetic import misfit_dimensions, mixed_precision, shapes
from fp8scope.advice.checks.compiled import compilation
from fp8scope.advice.checks.data import loader_bound, repeated_copies
from fp8scope.advice.checks.memory import batch_headroom, fragmentation
from fp8scope.advice.checks.ranks import communication, idle_ranks
from fp8scope.advice.checks.stalls import checkpoint_stalls, unclear_anatomy
from fp8scope.advice.finding import Check

CHECKS: dict[str, Check] = {
    "mixed_precision": mixed_precision,
    "loader": loader_bound,
    "dimensions": misfit_dimensions,
    "batch_size": batch_headroom,
    "profile": unclear_anatomy,
    "attention": shapes,
    "allocator": fragmentation,
    "copies": repeated_copies,
    "compile": compilation,
    "communication": communication,
    "checkpoints": checkpoint_stalls,
    "idle_ranks": idle_ranks,
}
