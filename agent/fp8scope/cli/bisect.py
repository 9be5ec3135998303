"""`fp8scope bisect`: rank the matrix products of an unmodified training script by their FP8 error.

The script runs until its model was called for training, and `backward` after it, the given number of times.
Then the inputs of the model, the random state and the gradient v of the loss with respect to the output are
kept, and the products of the FP8 layers are ranked by the gradient of v . model(inputs). This is the gradient
of the script's loss, linearised in the model's output. A factor that scales the loss cancels in relative
errors. After that the script is ended.
"""

import argparse
import json
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fp8scope_kernels
from fp8scope.cli.progress import ProgressLine
from fp8scope.cli.run_script import RECIPES
from fp8scope.control.bisection import SHOWN, Bisection, bisect
from fp8scope.control.precision import fp8_layers_of
from fp8scope.control.suspended_hooks import without_hooks
from fp8scope.control.training_state import RandomState, clone_batch
from fp8scope.observe.tensors.base import inside_backward
from fp8scope.process.open_runs import current_run

NOTE = "gradient of one batch of a script, with the loss linear in the model's output"


class _DoneError(BaseException):
    """Ends the script. Not an Exception, which the script may handle."""


class _NothingError(Exception):
    """There is nothing to bisect, and the message says why."""


def main(arguments: Sequence[str]) -> int:
    """Run a script until there is a batch to bisect; returns the exit status."""
    options = _parser().parse_args(list(arguments))
    if not options.script.is_file():
        print(f"fp8scope bisect: there is no script {options.script}.", file=sys.stderr)
        return 2
    capture = Capture(options.step, options.convert)
    before = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [str(options.script), *options.arguments], str(options.script.resolve().parent)
    try:
        with capture.installed():
            runpy.run_path(str(options.script), run_name="__main__")
    except _DoneError:
        pass
    except _NothingError as error:
        print(f"fp8scope bisect: {error}", file=sys.stderr)
        return 1
    finally:
        sys.argv, sys.path[0] = before
    if capture.found is None:
        print(f"fp8scope bisect: the script ended before {capture.progress()}.", file=sys.stderr)
        return 1
    _show(capture.found, options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fp8scope bisect",
        description="Rank the matrix products of a script's FP8 layers by their effect on the gradient.",
        usage="fp8scope bisect [--step N] [--convert RECIPE] [--json] SCRIPT [SCRIPT ARGUMENTS]",
    )
    parser.add_argument(
        "--step", type=_positive, default=1, help="the pass to bisect, from 1 (default: the first)"
    )
    parser.add_argument(
        "--convert",
        choices=sorted(RECIPES),
        help="convert the model's linear layers to FP8 with this recipe first",
    )
    parser.add_argument("--json", action="store_true", help="print the complete ranking as a line of JSON")
    parser.add_argument(
        "--top", type=_positive, default=SHOWN, help="rows of the table (default: %(default)s)"
    )
    parser.add_argument("script", type=Path, help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _show(bisection: Bisection, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(bisection.document()))
        return
    print(bisection.table(options.top))


class Capture:
    """Watches the training passes of the script, and bisects pass number `step`."""

    def __init__(self, step: int, recipe: str | None) -> None:
        self.found: Bisection | None = None
        self._step = step
        self._recipe = getattr(fp8scope_kernels, RECIPES[recipe])() if recipe is not None else None
        self._depth = 0
        self._passes = 0
        self._root: nn.Module | None = None
        self._call: tuple[Any, RandomState] | None = None
        self._output: Any = None
        self._busy = False

    def progress(self) -> str:
        """Return what did not happen before the script ended."""
        if self._root is None:
            return "a model with FP8 layers was called for training; --convert makes them"
        return f"pass {self._step}: it made {self._passes}"

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch the calls of all modules and all backward passes; restored afterwards."""
        call, backward = nn.Module.__call__, torch.autograd.backward
        nn.Module.__call__ = self._seeing(call)  # type: ignore[method-assign]
        # Tensor.backward calls it by this name.
        torch.autograd.backward = self._watching(backward)
        try:
            yield
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]
            torch.autograd.backward = backward

    def _seeing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Only what the script calls, not what that calls; and what is called to train.
            outer = self._depth == 0 and not self._busy and module.training and torch.is_grad_enabled()
            state = self._begin(module, args, kwargs) if outer else None
            self._depth += 1
            try:
                output = original(module, *args, **kwargs)
            finally:
                self._depth -= 1
            if state is not None:
                self._call, self._output = state, output
            return output

        return call

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, RandomState] | None:
        """Return the arguments and the random state if this is the pass to bisect."""
        if self._recipe is not None and not any(True for _ in fp8_layers_of(module)):
            fp8scope_kernels.convert(module, self._recipe)
        if not any(True for _ in fp8_layers_of(module)):
            return None
        self._root = module
        if self._passes + 1 < self._step:
            return None
        return clone_batch((args, kwargs)), RandomState([module])

    def _watching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self._root is None or self._busy or inside_backward():
                return original(tensors, *args, **kwargs)
            if self._passes + 1 < self._step or self._output is None:
                self._passes += 1
                return original(tensors, *args, **kwargs)
            self._bisect(tensors)
            raise _DoneError

        return backward

    def _bisect(self, loss: Any) -> None:
        root, call = self._root, self._call
        outputs = _differentiable(self._output)
        if root is None or call is None or not isinstance(loss, Tensor) or loss.numel() != 1 or not outputs:
            raise _NothingError(
                "the script calls backward on something other than a scalar loss of its model."
            )
        (args, kwargs), random_state = call
        slopes: Sequence[Any] = torch.autograd.grad(loss, outputs, allow_unused=True)
        weighted = [index for index, slope in enumerate(slopes) if slope is not None]
        # If the model returns its loss, the other outputs are not needed.
        weighted = [index for index in weighted if outputs[index].numel() == 1] or weighted
        if not weighted:
            raise _NothingError("the loss does not depend on what the model returned.")

        def product() -> Tensor:
            fresh = _differentiable(root(*clone_batch(args), **clone_batch(kwargs)))
            parts = [(fresh[index].float() * slopes[index].float()).sum() for index in weighted]
            return torch.stack(parts).sum()

        self._busy = True
        try:
            random_state.restore()
            with without_hooks([root]):
                line = ProgressLine("bisecting", unit="products")
                self.found = bisect([root], product, on_progress=line.update, note=NOTE)
                line.end()
        except ValueError as error:
            raise _NothingError(str(error)) from error
        run = current_run()
        if run is not None:
            run.session.send_report("bisect", **self.found.document())


def _differentiable(output: Any) -> list[Tensor]:
    """Return the tensors of a model's output that require gradients: a tensor, sequence or mapping."""
    if isinstance(output, Tensor):
        return [output] if output.requires_grad else []
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [tensor for value in output for tensor in _differentiable(value)]
    return []
