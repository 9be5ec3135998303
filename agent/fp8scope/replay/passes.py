"""Trains one step again and again from the same state, with different products in FP8.

The script itself trains: each pass is one more turn of its loop. So a pass has everything that the step had,
such as losses outside of the model, gradient accumulation, and a GradScaler.
"""

import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fp8scope.autolog.loss_capture import Loss, listen, unlisten
from fp8scope.control.bisection import Bisection, ProductDeviation, compare_gradients
from fp8scope.control.precision import fp8_layers_of, precision_of, products_of, set_products
from fp8scope.control.training_state import clone_batch
from fp8scope.guard import Guard
from fp8scope.incidents.batches import KeptBatch
from fp8scope.incidents.flight_recorder import FlightRecorder
from fp8scope.incidents.snapshots import Trained, restore_random
from fp8scope.recording.records import Row
from fp8scope_kernels import PRODUCTS, Product

NOTE = "one step of a replay, after its last backward pass"
REPEATED_GRADIENT = 0.01
"""The relative difference up to which two gradients count as the same: a GPU may sum in any order."""
OnProgress = Callable[[int, int], object]


class More(Protocol):
    """Draws another batch of the script's own; raises StopIteration after the last."""

    def __call__(self) -> Any: ...


@dataclass(frozen=True)
class Pass:
    """The result of one pass: the rows of its steps, and the gradient after its last backward pass."""

    rows: Sequence[Row]
    gradient: Sequence[Tensor]

    @property
    def is_finite(self) -> bool:
        """Return whether the gradient is finite. Waits for the device."""
        return all(bool(part.isfinite().all()) for part in self.gradient)


class GradientWatch:
    """Copies the gradients after a given backward pass of a step. A listener of `loss_capture`."""

    def __init__(self, models: Sequence[nn.Module], guard: Guard) -> None:
        every = dict.fromkeys(parameter for model in models for parameter in model.parameters())
        self._parameters = [parameter for parameter in every if parameter.requires_grad]
        self._guard = guard
        self.count = 0
        self.wanted: int | None = None
        """The number of the backward pass; None for the latest."""
        self.gradient: list[Tensor] = []

    def begin(self, wanted: int | None) -> None:
        self.count, self.wanted, self.gradient = 0, wanted, []

    def before_backward(self) -> Any:
        return None

    def after_backward(self, before: Any, loss: Loss | None) -> None:
        self.count += 1
        if self.wanted is None or self.count == self.wanted:
            self.gradient = [
                torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in self._parameters
            ]

    def before_scaler_step(self, optimizer: Optimizer) -> Any:
        return None

    def after_scaler_step(self, optimizer: Optimizer, before: Any) -> None:
        pass

    def failed(self, kind: str, error: Exception) -> None:
        self._guard.caught(kind, error)


class Passes:
    """Passes of one step, which begins in the present state. `kept`: its batches that are known already.

    `on_begin` is called before each pass.
    """

    def __init__(
        self,
        flight: FlightRecorder,
        trained: Trained,
        batches: list[KeptBatch],
        on_begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._flight = flight
        self._trained = trained
        self._kept = batches
        self._on_begin = on_begin
        self._begin = trained.capture()
        self._watch = GradientWatch(trained.models, flight.session.guard)
        self.layers = layers_in_fp8(trained)

    @property
    def batches(self) -> list[KeptBatch]:
        """The batches of the step, all of them once a pass is over."""
        return self._kept

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Copy gradients within the block."""
        listen(self._watch)
        try:
            yield
        finally:
            unlisten(self._watch)

    def first(self, more: More | None = None) -> Generator[Any, None, Pass]:
        """Yield the batches of the step as it is; `more` draws those that are not known."""
        self._on_begin()
        self._watch.begin(None)
        began = self._flight.session.steps.completed
        added = self._flight.ring.added
        for stored in self._kept:
            restore_random(stored.random)
            yield clone_batch(stored.batch)
        while more is not None and self._flight.session.steps.completed == began:
            try:
                batch = more()
            except StopIteration:
                break
            stored = KeptBatch.of(batch)
            self._kept.append(stored)
            yield batch
        return self._end(added)

    def again(self, products: Mapping[nn.Module, Collection[Product]] | None) -> Generator[Any, None, Pass]:
        """Yield the batches of the step from its state, with these products of layers in FP8; None: all."""
        self._on_begin()
        self._trained.load(self._begin)
        self._watch.begin(self._watch.wanted if self._watch.wanted is not None else self._watch.count)
        for _, layer in self.layers:
            set_products(layer, None if products is None else products.get(layer, frozenset()))
        added = self._flight.ring.added
        try:
            for stored in self._kept:
                restore_random(stored.random)
                yield clone_batch(stored.batch)
        finally:
            for _, layer in self.layers:
                set_products(layer, None)
        return self._end(added)

    def restore(self) -> None:
        """Return to the state before the step."""
        self._trained.load(self._begin)

    def _end(self, added: int) -> Pass:
        """Record the steps of the pass, and forget one that is not complete."""
        return Pass(recorded_since(self._flight, added), self._watch.gradient)


def layers_in_fp8(trained: Trained) -> list[tuple[str, nn.Module]]:
    """The paths of the layers that compute in FP8, and the layers."""
    return [
        (path, layer)
        for model in trained.models
        for path, layer in fp8_layers_of(model)
        if precision_of(layer) == "fp8"
    ]


def recorded_since(flight: FlightRecorder, added: int) -> list[Row]:
    """The rows of all steps that were completed since `flight.ring.added` was `added`."""
    steps = flight.session.steps
    if steps.follower is not None:
        steps.follower.complete()
    else:
        steps.end_logged()
    steps.pipeline.write_out()
    return flight.ring.rows_since(added)


def same_gradient(first: Pass, other: Pass) -> bool:
    """Return whether two passes of a step have the same gradient, up to REPEATED_GRADIENT. NaN equals NaN."""
    if len(first.gradient) != len(other.gradient):
        return False
    difference = size = 0.0
    for mine, theirs in zip(first.gradient, other.gradient, strict=True):
        if not torch.equal(mine.isfinite(), theirs.isfinite()):
            return False
        mine, theirs = (part.double().nan_to_num(0.0, 0.0, 0.0) for part in (mine, theirs))
        difference += float((mine - theirs).square().sum())
        size += float(mine.square().sum())
    return difference <= REPEATED_GRADIENT**2 * size


def bisection_of(
    passes: Passes, total: Pass, loss_of: Callable[[Pass], float | None], on_progress: OnProgress
) -> Generator[Any, None, Bisection | None]:
    """Yield batches for passes in BF16, and with each product alone in FP8. `total` is the one with all.

    The result is None if there is no FP8 layer, or if a pass has no loss or gradient.
    """
    if not passes.layers:
        return None
    began = time.perf_counter()
    cases = [
        (path, layer, product)
        for path, layer in passes.layers
        for product in PRODUCTS
        if product in products_of(layer)
    ]
    reference = yield from passes.again({})
    loss_fp8, loss_bf16 = loss_of(total), loss_of(reference)
    if loss_fp8 is None or loss_bf16 is None or not reference.gradient:
        return None
    errors = []
    for path, layer, product in cases:
        single = yield from passes.again({layer: frozenset((product,))})
        errors.append(ProductDeviation(path, product, *gradient_error(single, reference)))
        on_progress(len(errors), len(cases))
    errors.sort(key=lambda error: (error.relative_error == error.relative_error, -error.relative_error))
    together = ProductDeviation("*", "fprop", *gradient_error(total, reference))
    seconds = time.perf_counter() - began
    return Bisection(
        products=tuple(errors),
        total=together,
        loss_bf16=loss_bf16,
        loss_fp8=loss_fp8,
        seconds=seconds,
        note=NOTE,
        exact_is_finite=reference.is_finite,
    )


def gradient_error(result: Pass, reference: Pass) -> tuple[float, float]:
    """Relative error and cosine of a pass's gradient; NaN if one of both is not finite or is missing."""
    if len(result.gradient) != len(reference.gradient):
        return float("nan"), float("nan")
    try:
        return compare_gradients(result.gradient, reference.gradient)
    except ValueError:
        # Nothing to divide by. Equal gradients differ by nothing all the same.
        pairs = zip(result.gradient, reference.gradient, strict=True)
        is_same = all(torch.equal(mine, exact) for mine, exact in pairs)
        return (0.0, 1.0) if is_same else (float("nan"), float("nan"))
