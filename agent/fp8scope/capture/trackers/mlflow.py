"""MLflow: all of its functions, autologging included, end in methods of `MlflowClient`."""

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from fp8scope.capture.descriptions import from_text
from fp8scope.capture.media import of_file, of_image
from fp8scope.capture.patching import TrackerPatches

NAME = "mlflow"


def install(patches: TrackerPatches) -> None:
    """Capture `log_metric`, `log_param`, `log_batch`, `log_artifact` and `log_image` of the client."""
    capture = patches.capture

    def log_metric(
        client: Any,
        run_id: Any,
        key: Any,
        value: Any,
        timestamp: Any = None,
        step: Any = None,
        *_: Any,
        **__: Any,
    ) -> None:
        capture.take(NAME, {key: value}, step or 0)

    def log_param(client: Any, run_id: Any, key: Any, value: Any, *_: Any, **__: Any) -> None:
        capture.configure(NAME, {key: value})

    def log_batch(
        client: Any, run_id: Any, metrics: Iterable[Any] = (), params: Iterable[Any] = (), *_: Any, **__: Any
    ) -> None:
        if isinstance(metrics, list | tuple):
            for metric in metrics:
                capture.take(NAME, {metric.key: metric.value}, metric.step or 0)
        if params and isinstance(params, list | tuple):
            capture.configure(NAME, {param.key: from_text(str(param.value)) for param in params})

    def log_artifact(client: Any, run_id: Any, local_path: Any, artifact_path: Any = None) -> None:
        # Texts, figures, dictionaries and tables of MLflow come by this function, too.
        if artifact_path == "images" and "+timestamp+" in str(local_path):
            # An image with a key, which `log_image` has given, and its small copy.
            return
        media = of_file(local_path, artifact_path)
        if media is not None:
            capture.take_media(NAME, lambda: iter([media]))

    def log_image(
        client: Any, run_id: Any, image: Any, artifact_file: Any = None, key: Any = None, *_: Any, **__: Any
    ) -> None:
        if key is not None:
            pixels = image.to_pil() if hasattr(image, "to_pil") else image
            capture.take_media(NAME, lambda: of_image(key, pixels))

    def replace(module: ModuleType) -> None:
        client = module.MlflowClient
        patches.before(client, "log_metric", log_metric, tracker=NAME)
        patches.before(client, "log_param", log_param, tracker=NAME)
        patches.before(client, "log_batch", log_batch, tracker=NAME)
        patches.before(client, "log_artifact", log_artifact, tracker=NAME)
        patches.before(client, "log_image", log_image, tracker=NAME)

    patches.when_imported("mlflow.tracking.client", replace)
