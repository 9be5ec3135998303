"""The passes over experts, forwards and backwards: one expert after the other, or products of all at once.

One after the other is exact on every device: the same operations as those of an `Fp8Linear`. Where torch has
a grouped product, the matrices are quantised in the same order, so that scales and counters have the same
bits, and are multiplied together.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8scope_kernels.experts import grouped_matmul
from fp8scope_kernels.linear_product import (
    PRODUCTS,
    Gradients,
    ProductSettings,
    Quantizer,
    operands_of,
    run_backward,
    run_forward,
)
from fp8scope_kernels.matmul import Operand, exact_operand, multiply
from fp8scope_kernels.torch_internals import current_graph_task_id


class Span(NamedTuple):
    """The tokens of one expert: rows `start` to `end`. `row`: that of its weight in the tensor of weights."""

    expert: int
    row: int
    start: int
    end: int


class Saved(NamedTuple):
    """The operands that the backward pass of one expert needs."""

    x_t: Operand
    weight_t: Operand


def forward_pass(
    quantizers: Sequence[Quantizer],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spans: Sequence[Span],
    settings: ProductSettings,
) -> tuple[Tensor, list[Tensor]]:
    """The output [tokens, out], and four tensors for each span, see `linear_product.Passed`.

    `quantizers`: one for each span.
    """
    output = x.new_empty((x.shape[0], weight.shape[1]), dtype=settings.out_dtype)
    output[_end_of(spans) :] = 0
    saved: list[Tensor] = []
    together = len(spans) > 1 and grouped_matmul.takes_groups(x.device)
    left, right = [], []
    for quantizer, (_, row, start, end) in zip(quantizers, spans, strict=True):
        if together:
            a, b, operands = _quantize(quantizer, x[start:end], weight[row], settings)
            left.append(a)
            right.append(b)
        else:
            own_bias = None if bias is None else bias[row]
            part, *operands = run_forward(quantizer, x[start:end], weight[row], own_bias, settings)
            output[start:end] = part
        saved += operands
    if not together:
        return output, saved
    rows = grouped_matmul.multiply_tokens(left, right, settings.out_dtype)
    for index, (_, row, start, end) in enumerate(spans):
        product = multiply(left[index], right[index], settings.out_dtype) if rows is None else rows[start:end]
        output[start:end] = product if bias is None else product + bias[row]
    return output, saved


def backward_pass(
    quantizers: Sequence[Quantizer],
    grad: Tensor,
    saved: Sequence[Saved],
    spans: Sequence[Span],
    products: str,
    results: Gradients,
    rows: int,
) -> None:
    """Write the gradients into `results`, where they are wanted: zeros of experts without tokens."""
    rest = sorted(set(range(rows)) - {span.row for span in spans})
    if results.x is not None:
        results.x[_end_of(spans) :] = 0
    for result in (results.weight, results.bias):
        if result is not None and rest:
            result[rest] = 0
    if len(spans) > 1 and grouped_matmul.takes_groups(grad.device):
        _backward_together(quantizers, grad, saved, spans, products, results)
        return
    dtypes = [None if result is None else result.dtype for result in results]
    for quantizer, (x_t, weight_t), (_, row, start, end) in zip(quantizers, saved, spans, strict=True):
        made = run_backward(quantizer, grad[start:end], x_t, weight_t, products, dtypes)
        for whole, part, first, last in zip(
            results, made, (start, row, row), (end, row + 1, row + 1), strict=True
        ):
            if whole is not None and part is not None:
                whole[first:last] = part


def _end_of(spans: Sequence[Span]) -> int:
    """The number of tokens that belong to experts: spans follow each other from the first one on."""
    return spans[-1].end if spans else 0


def _quantize(
    quantizer: Quantizer, x: Tensor, weight: Tensor, settings: ProductSettings
) -> tuple[Operand, Operand, list[Tensor]]:
    """Both operands of an expert's output, and those of its backward pass: `run_forward` but the product."""
    fprop, dgrad, wgrad = (name in settings.products for name in PRODUCTS)
    keeps_x, keeps_weight = wgrad and settings.for_weight, dgrad and settings.for_x
    # A forward call inside a backward pass recomputes what activation checkpointing has dropped.
    update = quantizer.training and current_graph_task_id() == -1
    saved = [x.new_empty(0), x.new_empty(0, dtype=torch.float32)] * 2
    if fprop or wgrad:
        left, turned = quantizer.quantize("input", x, update=update, transpose=keeps_x)
        saved[:2] = turned if keeps_x else saved[:2]
    if fprop or dgrad:
        right, turned = quantizer.quantize("weight", weight, update=update, transpose=keeps_weight)
        saved[2:] = turned if keeps_weight else saved[2:]
    if not fprop:
        return exact_operand(x), exact_operand(weight).t(), saved
    return left, right.t(), saved


def _backward_together(
    quantizers: Sequence[Quantizer],
    grad: Tensor,
    saved: Sequence[Saved],
    spans: Sequence[Span],
    products: str,
    results: Gradients,
) -> None:
    """`run_backward` of all experts, with products of all at once."""
    for_x, for_weight, for_bias = results
    dgrad, wgrad = for_x is not None and "dgrad" in products, for_weight is not None and "wgrad" in products
    by_rows, by_columns = [], []
    for quantizer, (_, row, start, end) in zip(quantizers, spans, strict=True):
        part = grad[start:end]
        if dgrad or wgrad:
            quantized, quantized_t = quantizer.quantize(
                "grad_output", part, update=quantizer.training, transpose=wgrad
            )
        by_rows.append(quantized if dgrad else exact_operand(part))
        by_columns.append(quantized_t if wgrad else exact_operand(part).t())
        if for_bias is not None:
            for_bias[row] = part.sum(0, dtype=for_bias.dtype)
    if for_x is not None:
        weights = [own.weight_t.t() for own in saved]
        rows = grouped_matmul.multiply_tokens(by_rows, weights, for_x.dtype)
        if rows is not None:
            for_x[: rows.shape[0]] = rows
        else:
            for left, right, span in zip(by_rows, weights, spans, strict=True):
                for_x[span.start : span.end] = multiply(left, right, for_x.dtype)
    if for_weight is not None:
        inputs = [own.x_t.t() for own in saved]
        matrices: Any = grouped_matmul.multiply_over_tokens(by_columns, inputs, for_weight.dtype)
        for index, span in enumerate(spans):
            for_weight[span.row] = (
                matrices[index]
                if matrices is not None
                else multiply(by_columns[index], inputs[index], for_weight.dtype)
            )


def saved_operands(
    tensors: Sequence[Tensor], x: Tensor | None, weight: Tensor | None, spans: Sequence[Span]
) -> list[Saved]:
    """The operands of the backward pass, from the tensors of `forward_pass`, or BF16 of x and weight."""
    return [
        Saved(
            *operands_of(
                tensors[4 * index],
                tensors[4 * index + 1],
                tensors[4 * index + 2],
                tensors[4 * index + 3],
                None if x is None else x[start:end],
                None if weight is None else weight[row],
            )
        )
        for index, (_, row, start, end) in enumerate(spans)
    ]
