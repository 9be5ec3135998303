"""Data: the wait for the loader, and tensors that are copied again and again."""

from typing import Final

from fp8scope.advice.finding import AdviceFinding, Gain, percent
from fp8scope.advice.record import RunRecord

MIN_WAIT: Final = 0.15
MIN_WAIT_SECONDS: Final = 0.002
"""Below it, handing a batch from a worker to the training takes as long."""
MAX_WORKERS: Final = 8
MIN_TIMES: Final = 10


def loader_bound(run: RunRecord) -> AdviceFinding | None:
    """Steps that wait for a `DataLoader`."""
    rank = run.first
    loader, wait = rank.facts.get("loader"), rank.share("data")
    if loader is None or not rank.is_measured or min(wait, rank.typical_share("data")) < MIN_WAIT:
        return None
    step = float(rank.seconds.mean())
    seconds, rest = wait * step, (1 - wait) * step
    if seconds < MIN_WAIT_SECONDS:
        return None
    workers, cpus = loader["workers"], rank.facts.get("cpus", 1)
    if workers >= cpus:
        # More workers would share the same CPUs.
        gain = Gain(
            low=0.0, high=wait, formula="0 to d: d the wait of a step; as much as a sample becomes cheaper"
        )
        change = (
            "Every CPU has a worker, so more of them do not help. Make a sample cheaper (decode, resize and "
            "tokenise ahead of time), or use a machine with more CPUs."
        )
    else:
        more = min(max(2 * workers, 2), MAX_WORKERS, max(cpus, 2))
        gain = _gain_of_workers(workers, more, seconds, rest)
        change = f"DataLoader(..., num_workers={more}, persistent_workers=True"
        change += (
            ")." if rank.facts.get("device") == "cpu" else ", pin_memory=True), non_blocking=True in copies."
        )
    return AdviceFinding(
        practice="loader",
        title="The training waits for its data loader",
        evidence=f"{percent(wait)} of the steps' time ({1000 * seconds:.1f} ms of {1000 * step:.1f} ms) is "
        f"spent in a DataLoader with {workers} workers, on {cpus} CPUs.",
        gain=gain,
        change=change,
    )


def _gain_of_workers(workers: int, more: int, seconds: float, rest: float) -> Gain:
    """Return the gain of `more` workers, of a wait of `seconds` a step whose other parts take `rest`."""
    # Workers prepare batches while the training computes; without them one follows the other.
    supply = seconds if workers == 0 else (seconds + rest) * workers
    left = max(0.0, supply / more - rest)
    high = max(0.0, seconds - left) / (seconds + rest)
    return Gain(
        low=high / 2,
        high=high,
        formula=f"(d - max(0, b/{more} - r)) / t, and half of it if workers share CPUs with the training: "
        "d the wait of a step, r its remaining time, t both, b the time of a batch (d without workers, else "
        "t times their number)",
    )


def repeated_copies(run: RunRecord) -> AdviceFinding | None:
    """A tensor that has not changed and is copied to the device in most steps."""
    rank = run.first
    facts = rank.facts.get("copies") or {"bytes": 0, "repeated": []}
    often = max(MIN_TIMES, rank.facts.get("steps", 0) / 2)
    repeated = [row for row in facts["repeated"] if row["times"] >= often]
    if not repeated:
        return None
    copied = sum(row["times"] * row["bytes"] for row in repeated)
    largest = max(repeated, key=lambda row: row["bytes"])
    part = min(1.0, copied / max(facts["bytes"], 1))
    high = rank.share("copy") * part
    return AdviceFinding(
        practice="copies",
        title="The same tensor is copied to the device in every step",
        evidence=f"{len(repeated)} unchanged tensors are copied again and again, the largest (shape "
        f"{largest['shape']}, {largest['bytes']} bytes) {largest['times']} times. They are {percent(part)} "
        f"of the bytes that are copied, and copies take {percent(rank.share('copy'))} of the time.",
        gain=Gain(
            low=high / 2,
            high=high,
            formula="h q / 2 to h q: h the share of copies in the step, q that of repeats in the bytes",
        ),
        change="Copy it once, before the loop: register_buffer in the model, or a variable on the device.",
    )
