"""The functions of each tracker that are replaced while its calls are captured.

An installer imports nothing: it says which functions of which modules to replace once the program has
imported them.
"""

from collections.abc import Mapping

from fp8scope.capture.patching import Install
from fp8scope.capture.trackers import accelerate, aim, lightning, mlflow, swanlab, tensorboard, trackio, wandb

INSTALLERS: Mapping[str, Install] = {
    "accelerate": accelerate.install,
    "aim": aim.install,
    "lightning": lightning.install,
    "mlflow": mlflow.install,
    "swanlab": swanlab.install,
    "tensorboard": tensorboard.install,
    "trackio": trackio.install,
    "wandb": wandb.install,
}
