"""Megatron-LM and Megatron-Bridge: their TensorBoard writer, which gives its values to fp8scope as well.

Megatron-LM: `fp8scope.integrations.megatron.record(name="...")` before `pretrain(...)`. Megatron-Bridge:
`pretrain(config, forward_step, callbacks=[Fp8scopeCallback(name="...")])`. Both log on the last rank.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fp8scope.integrations.run_values import RunValues

if TYPE_CHECKING:
    from fp8scope.run import Run

BY_SAMPLES = " vs samples"
"""Ends the names of values that Megatron writes a second time, with the samples in place of the iteration."""


class Fp8scopeWriter:
    """A `SummaryWriter` that records scalars in a run, and hands calls on to Megatron's own writer, if any.

    `run` is a run that has already begun. Without it, values go to the run that this process records, else to
    one that begins with `arguments` as for `fp8scope.init`. Values that Megatron writes once more by samples
    are not recorded again; the samples are, as `megatron/samples`.
    """

    def __init__(self, theirs: Any = None, run: "Run | None" = None, **arguments: Any) -> None:
        self._theirs = theirs
        self._iteration = 0
        self.values = RunValues("megatron", run, **arguments)

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None, *more: Any) -> None:
        """Record a scalar, and hand it on."""
        if tag.endswith(BY_SAMPLES):
            self.values.log({"megatron/samples": global_step}, self._iteration)
        else:
            self._iteration = self._iteration if global_step is None else int(global_step)
            self.values.log({tag: scalar_value}, self._iteration)
        if self._theirs is not None:
            self._theirs.add_scalar(tag, scalar_value, global_step, *more)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing if self._theirs is None else getattr(self._theirs, name)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for a method of a writer that there is not."""


def record(run: "Run | None" = None, **arguments: Any) -> None:
    """Record what Megatron-LM writes to TensorBoard, with or without `--tensorboard-dir`.

    Call it before `pretrain`, which makes the writer. For the arguments see `Fp8scopeWriter`.
    """
    from megatron.training import global_vars

    def setting(original: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(original)
        def _set_tensorboard_writer(args: Any) -> None:
            original(args)
            if args.rank == args.world_size - 1:
                writer = Fp8scopeWriter(global_vars._GLOBAL_TENSORBOARD_WRITER, run, **arguments)
                writer.values.configure(vars(args))
                global_vars._GLOBAL_TENSORBOARD_WRITER = writer

        return _set_tensorboard_writer

    global_vars._set_tensorboard_writer = setting(global_vars._set_tensorboard_writer)


class Fp8scopeCallback:
    """A callback of Megatron-Bridge, which replaces its TensorBoard writer.

    For the arguments see `Fp8scopeWriter`. Megatron-Bridge looks for methods of a callback by their names, so
    that no base class is needed.
    """

    def __init__(self, run: "Run | None" = None, **arguments: Any) -> None:
        self._run = run
        self._arguments = arguments
        self.writer: Fp8scopeWriter | None = None

    def on_train_start(self, context: Any) -> None:
        """Replace the writer of the last rank."""
        state = context.state
        if _is_last_rank() and self.writer is None:
            self.writer = Fp8scopeWriter(state.tensorboard_logger, self._run, **self._arguments)
            config = state.cfg.to_dict() if hasattr(state.cfg, "to_dict") else {}
            self.writer.values.configure(config)
            state._tensorboard_logger = self.writer

    def on_train_end(self, context: Any) -> None:
        """Leave the run open: a test may follow. It ends with the process."""


def _is_last_rank() -> bool:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return True
    return bool(distributed.get_rank() == distributed.get_world_size() - 1)
