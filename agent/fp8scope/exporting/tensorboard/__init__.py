"""TensorBoard: an event file, written without its package or TensorFlow."""

from fp8scope.exporting.tensorboard.run_events import write

__all__ = ["write"]
