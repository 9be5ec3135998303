"""A loader for neptune-exporter, beside those that it has: its LoaderManager sends runs to fp8scope.

The class has the methods of neptune_exporter.loaders.loader.DataLoader, and needs nothing of that package.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8scope.config import Settings, settings_from
from fp8scope.importing.formats.neptune import FORMAT, NeptuneRuns
from fp8scope.importing.sending import ImportUpload, Wishes, run_id_of

logger = logging.getLogger(__name__)


class NeptuneLoader:
    """Sends what the exporter reads from its files, as `fp8scope import` does: the runs are the same ones.

    `settings` are by default those of a login or the environment; `loss` names the metric that is the loss.
    """

    def __init__(
        self, settings: Settings | None = None, *, loss: str = "", wishes: Wishes | None = None
    ) -> None:
        self._settings = settings or settings_from(mode="online")
        self._loss = loss
        self._wishes = wishes or Wishes()

    def create_experiment(self, project_id: str, experiment_name: str) -> str:
        """Return the name: an experiment needs nothing on the server."""
        return experiment_name

    def find_run(self, project_id: str, run_name: str, experiment_id: str | None) -> str | None:
        """Return None: what the server has is not sent twice, and what is new is added."""
        return None

    def create_run(
        self,
        project_id: str,
        run_name: str,
        experiment_id: str | None = None,
        parent_run_id: str | None = None,
        fork_step: float | None = None,
        step_multiplier: int | None = None,
    ) -> str:
        """Return the name: the run is registered with its values, which say its id."""
        return run_name

    def upload_run_data(
        self, run_data: Iterator[Any], run_id: str, files_directory: Path, step_multiplier: int
    ) -> None:
        """Send a run.

        Args:
            run_data: its parts, of the type `pyarrow.Table`.
            run_id: what `create_run` has returned.
            files_directory: not read.
            step_multiplier: makes whole steps of Neptune's decimal ones.

        Raises:
            UnreadableError: the tables are not as the exporter writes them.
            TransferError: the server refuses the run, or does not answer for two minutes.
        """
        runs = NeptuneRuns(f"the run {run_id}", step_multiplier)
        for table in run_data:
            for batch in table.to_batches():
                runs.add(batch)
        for run in runs.as_source_runs(self._loss):
            identity = run_id_of(FORMAT.name, run.key, self._wishes)
            upload = ImportUpload(self._settings, run, identity, self._wishes, format_name=FORMAT.name)
            for _ in upload.send():
                pass
            sent = upload.sent
            logger.info("%s: %s: %d rows, %d values", upload.page, run.name, sent.rows, sent.points)
            for note in run.notes:
                logger.warning("%s: %s", run.name, note)
