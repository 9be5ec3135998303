"""TensorBoard: the `SummaryWriter` of torch and of tensorboardX."""

from types import ModuleType
from typing import Any

from fp8scope.capture.patching import TrackerPatches

NAME = "tensorboard"
MODULES = ("torch.utils.tensorboard.writer", "tensorboardX.writer")


def install(patches: TrackerPatches) -> None:
    """Capture `add_scalar`, `add_scalars` and `add_hparams`."""
    capture = patches.capture

    def add_scalar(
        writer: Any, tag: Any, scalar_value: Any, global_step: Any = None, *_: Any, **__: Any
    ) -> None:
        # The writer leaves a step out that is None, and readers take it for 0.
        capture.take(NAME, {tag: scalar_value}, 0 if global_step is None else global_step)

    def add_scalars(
        writer: Any, main_tag: Any, tag_scalar_dict: Any, global_step: Any = None, *_: Any, **__: Any
    ) -> None:
        # The writer makes a folder `<main>_<tag>` of each.
        capture.take(NAME, {main_tag: tag_scalar_dict}, 0 if global_step is None else global_step)

    def add_hparams(writer: Any, hparam_dict: Any, *_: Any, **__: Any) -> None:
        # The metrics come by `add_scalar` of another writer.
        capture.configure(NAME, hparam_dict)

    def replace(module: ModuleType) -> None:
        writer = module.SummaryWriter
        patches.before(writer, "add_scalar", add_scalar, tracker=NAME)
        patches.before(writer, "add_scalars", add_scalars, tracker=NAME)
        patches.before(writer, "add_hparams", add_hparams, tracker=NAME)

    for module in MODULES:
        patches.when_imported(module, replace)
