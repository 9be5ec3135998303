"""Finds the matrix products whose FP8 error affects the gradient most.

Each FP8 layer has three products (fprop, dgrad, wgrad; see `fp8scope_kernels.linear`). For each product, one
forward and backward pass of the same batch computes only this product in FP8 and all others in BF16. Its
gradient g, of all parameters as one vector, is compared with the gradient r of a pass entirely in BF16:

    relative error = |g - r| / |r|        cosine = g . r / (|g| |r|)

All passes start from the same state and random numbers, with the scales that the next training step would
use. Scales, buffers, gradients and random state are restored afterwards.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fp8scope.control.precision import fp8_layers_of, precision_of, products_of, set_products
from fp8scope.control.training_state import ModelState, RandomState
from fp8scope.recording.records import wire_number
from fp8scope_kernels import PRODUCTS, Product

LossFunction: TypeAlias = Callable[[Any], Tensor]

OnProgress: TypeAlias = Callable[[int, int], object]

MAX_REPORTED = 2000
SHOWN = 20


@dataclass(frozen=True)
class ProductDeviation:
    """The error of the full gradient with one product in FP8. NaN if a gradient is not finite."""

    layer: str
    product: Product
    relative_error: float
    cosine: float


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """The errors of the products of all FP8 layers, worst first, and of all products together."""

    products: tuple[ProductDeviation, ...]
    total: ProductDeviation
    """All products in FP8 at once; its `layer` is `*`."""
    loss_bf16: float
    loss_fp8: float
    seconds: float
    note: str = ""
    exact_is_finite: bool = True
    """True if the gradient in BF16 is finite; else there is nothing to compare with."""

    @property
    def worst(self) -> ProductDeviation:
        return self.products[0]

    def document(self) -> dict[str, Any]:
        """Return the fields of a report of kind `bisect`; see docs/wire.md."""
        return {
            "products": [
                {
                    "layer": error.layer[:512],
                    "product": error.product,
                    "relative_error": wire_number(error.relative_error),
                    "cosine": wire_number(error.cosine),
                }
                for error in self.products[:MAX_REPORTED]
            ],
            "measured": len(self.products),
            "total_error": wire_number(self.total.relative_error),
            "total_cosine": wire_number(self.total.cosine),
            "loss_bf16": wire_number(self.loss_bf16),
            "loss_fp8": wire_number(self.loss_fp8),
            "seconds": round(self.seconds, 3),
            "note": self.note,
        }

    def table(self, shown: int = SHOWN) -> str:
        """Return the `shown` worst products and the total as a table in plain text."""
        rows: list[tuple[str, ...]] = [("#", "layer", "product", "relative error", "cosine")]
        rows += [
            (str(rank), product.layer, product.product, *_percent_and_cosine(product))
            for rank, product in enumerate(self.products[:shown], 1)
        ]
        if len(self.products) > shown:
            rows.append(("", f"... {len(self.products) - shown} more", "", "", ""))
        rows.append(("", "all products", "", *_percent_and_cosine(self.total)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rows.insert(1, tuple("-" * width for width in widths))
        lines = [
            f"{rank:>{widths[0]}}  {layer:<{widths[1]}}  {product:<{widths[2]}}"
            f"  {error:>{widths[3]}}  {cosine:>{widths[4]}}"
            for rank, layer, product, error, cosine in rows
        ]
        return "\n".join(["Gradient error of single products in FP8, relative to BF16", *lines])

    def __str__(self) -> str:
        losses = f"loss {self.loss_bf16:.6g} in BF16, {self.loss_fp8:.6g} in FP8; {self.seconds:.1f} s"
        return f"{self.table()}\n{losses}\n"


def bisect(
    models: Sequence[nn.Module],
    loss: Callable[[], Tensor],
    *,
    on_progress: OnProgress | None = None,
    note: str = "",
) -> Bisection:
    """Rank the products of the models' FP8 layers. `loss()` computes the loss, a tensor of one element.

    `on_progress` is called with the number of finished products and the total.

    Raises ValueError if there is no FP8 layer or no gradient, and propagates exceptions of `loss`. The models
    are restored in these cases too.
    """
    layers = [
        (path, layer)
        for model in models
        for path, layer in fp8_layers_of(model)
        if precision_of(layer) == "fp8"
    ]
    if not layers:
        raise ValueError("there is no FP8 layer to bisect: call run.watch(model) first, or pass model=.")
    began = time.perf_counter()
    passes = _Passes(models, layers, loss)
    cases = [
        (path, layer, product)
        for path, layer in layers
        for product in PRODUCTS
        if product in products_of(layer)
    ]
    errors: list[ProductDeviation] = []
    try:
        loss_bf16, reference = passes.run({})
        for path, layer, product in cases:
            _, gradient = passes.run({layer: frozenset((product,))})
            errors.append(ProductDeviation(path, product, *compare_gradients(gradient, reference)))
            if on_progress is not None:
                on_progress(len(errors), len(cases))
        loss_fp8, gradient = passes.run(None)
        total = ProductDeviation("*", "fprop", *compare_gradients(gradient, reference))
    finally:
        passes.end()
    # NaN, from a gradient that is not finite, is the worst error.
    errors.sort(key=lambda error: (error.relative_error == error.relative_error, -error.relative_error))
    return Bisection(
        products=tuple(errors),
        total=total,
        loss_bf16=loss_bf16,
        loss_fp8=loss_fp8,
        seconds=time.perf_counter() - began,
        note=note,
    )


def _percent_and_cosine(product: ProductDeviation) -> tuple[str, str]:
    return f"{product.relative_error:.3%}", f"{product.cosine:.6f}"


class _Passes:
    """Forward and backward passes of one batch, each from the same state."""

    def __init__(
        self, models: Sequence[nn.Module], layers: Sequence[tuple[str, nn.Module]], loss: Callable[[], Tensor]
    ) -> None:
        self._layers = [layer for _, layer in layers]
        self._loss = loss
        self._state = ModelState(models, parameters=False)
        self._random = RandomState(models)
        every = dict.fromkeys(parameter for model in models for parameter in model.parameters())
        self._parameters = [parameter for parameter in every if parameter.requires_grad]
        self._gradients = [(parameter, parameter.grad) for parameter in self._parameters]

    def run(self, chosen: "dict[nn.Module, frozenset[Product]] | None") -> tuple[float, list[Tensor]]:
        """Return loss and gradients with the `chosen` products in FP8; None leaves the layers unchanged."""
        self._restore()
        for layer in self._layers:
            set_products(layer, None if chosen is None else chosen.get(layer, frozenset()))
        for parameter in self._parameters:
            parameter.grad = None
        with torch.enable_grad():
            loss: Any = self._loss()
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise ValueError("loss_fn must return the loss, a tensor of one element.")
            loss.backward()  # type: ignore[no-untyped-call]
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self._parameters
        ]
        return float(loss.detach().double().cpu().reshape(())), gradients

    def _restore(self) -> None:
        self._random.restore()
        self._state.restore()

    def end(self) -> None:
        """Restore everything to the state before the passes."""
        for layer in self._layers:
            set_products(layer, None)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._restore()


def compare_gradients(gradient: Sequence[Tensor], reference: Sequence[Tensor]) -> tuple[float, float]:
    """Return relative error and cosine of a gradient, given in pieces. Waits for the device only once."""
    sums = torch.zeros(4, dtype=torch.float64, device=reference[0].device)
    for mine, exact in zip(gradient, reference, strict=True):
        a, b = mine.detach().double().reshape(-1), exact.detach().double().reshape(-1)
        difference = a - b
        sums += torch.stack((difference @ difference, b @ b, a @ a, a @ b)).to(sums.device)
    apart, exact_square, square, product = sums.cpu().tolist()
    if not exact_square > 0:
        raise ValueError("the gradient in BF16 is zero or not finite, so there is nothing to compare with.")
    cosine = product / (exact_square * square) ** 0.5 if square > 0 else 0.0
    return (apart / exact_square) ** 0.5, cosine
