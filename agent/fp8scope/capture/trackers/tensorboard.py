"""TensorBoard: the `SummaryWriter` of torch and of tensorboardX."""

from types import ModuleType
from typing import Any

from fp8scope.capture.media import of_summary_image, of_text
from fp8scope.capture.patching import TrackerPatches

NAME = "tensorboard"
MODULES = ("torch.utils.tensorboard.writer", "tensorboardX.writer")


def install(patches: TrackerPatches) -> None:
    """Capture `add_scalar`, `add_scalars` and `add_hparams`, images and texts."""
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

    def add_image(
        writer: Any,
        tag: Any,
        img_tensor: Any,
        global_step: Any = None,
        walltime: Any = None,
        dataformats: str = "CHW",
    ) -> None:
        # A figure comes by this function, too.
        capture.take_media(NAME, lambda: of_summary_image(tag, img_tensor, dataformats))

    def add_images(
        writer: Any,
        tag: Any,
        img_tensor: Any,
        global_step: Any = None,
        walltime: Any = None,
        dataformats: str = "NCHW",
    ) -> None:
        capture.take_media(NAME, lambda: of_summary_image(tag, img_tensor, dataformats))

    def add_text(writer: Any, tag: Any, text_string: Any, *_: Any, **__: Any) -> None:
        capture.take_media(NAME, lambda: iter([of_text(tag, text_string)]))

    def add_hparams(writer: Any, hparam_dict: Any, *_: Any, **__: Any) -> None:
        # The metrics come by `add_scalar` of another writer.
        capture.configure(NAME, hparam_dict)

    def replace(module: ModuleType) -> None:
        writer = module.SummaryWriter
        patches.before(writer, "add_scalar", add_scalar, tracker=NAME)
        patches.before(writer, "add_scalars", add_scalars, tracker=NAME)
        patches.before(writer, "add_hparams", add_hparams, tracker=NAME)
        patches.before(writer, "add_image", add_image, tracker=NAME)
        patches.before(writer, "add_images", add_images, tracker=NAME)
        patches.before(writer, "add_text", add_text, tracker=NAME)

    for module in MODULES:
        patches.when_imported(module, replace)
