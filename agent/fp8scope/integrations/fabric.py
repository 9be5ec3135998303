"""Lightning Fabric (`lightning` or `lightning_fabric`): `Fabric(loggers=Fp8scopeLogger(project="..."))`."""

import sys
from typing import TYPE_CHECKING

from fp8scope.integrations.lightning_logger import LoggerMethods

if TYPE_CHECKING:
    from lightning.fabric.loggers import Logger
elif "lightning_fabric" in sys.modules and "lightning.fabric" not in sys.modules:
    # The two packages define different classes: import from the one that the program uses.
    from lightning_fabric.loggers import Logger
else:
    try:
        from lightning.fabric.loggers import Logger
    except ModuleNotFoundError:
        from lightning_fabric.loggers import Logger


class Fp8scopeLogger(LoggerMethods, Logger):
    """Records what `fabric.log` and `fabric.log_dict` give to loggers; see `LoggerMethods`.

    Fabric has no callbacks: `fp8scope.attach(model, optimizer)` records tensors and every loss as well.
    """
