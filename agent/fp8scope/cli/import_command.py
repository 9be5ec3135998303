"""`fp8scope import`: upload runs from files of other tools, or a run that `fp8scope export` wrote."""

import argparse
import sys
import uuid
from pathlib import Path

from fp8scope.cli.progress import MIB, ProgressLine
from fp8scope.cli.server import server_settings
from fp8scope.config import ConfigurationError, Settings
from fp8scope.guard import configure_logging
from fp8scope.importing.model import SourceEvaluation, SourceMedia, SourceRun, UnreadableError
from fp8scope.importing.posting import TransferError
from fp8scope.importing.registry import FORMATS, sources_of
from fp8scope.importing.sending import ImportUpload, Wishes, run_id_of
from fp8scope.importing.source import FileFormat, ImportSource

ARCHIVE = "fp8scope"


def import_(arguments: list[str]) -> int:
    """Upload runs from files of other tools, or a run that `fp8scope export` wrote."""
    options = _parser().parse_args(arguments)
    configure_logging()
    try:
        # A dry run needs no server.
        settings = Settings() if options.dry_run else server_settings(options.url, options.project)
        if options.format == ARCHIVE or (not options.format and _is_archive(options.path)):
            # pyarrow is needed for these files only.
            from fp8scope.cli.import_run import import_archive

            return import_archive(settings, options.path, options.id)
        return _Import(settings, options).run()
    except ImportError as error:
        print(f"fp8scope import: {error}: pip install 'fp8scope[import]'", file=sys.stderr)
    except (ConfigurationError, TransferError, UnreadableError, OSError) as error:
        print(f"fp8scope import: {error}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fp8scope import", description=import_.__doc__)
    parser.add_argument("path", type=Path, help="a file, or a folder with files")
    names = [ARCHIVE, *(form.name for form in FORMATS)]
    parser.add_argument("--format", choices=names, help="default: what the content shows")
    parser.add_argument("--name", default="", help="the name of the run")
    parser.add_argument("--group", default="", help="the group of runs that differ only in their seed")
    parser.add_argument("--baseline", default="", help="the group, or the id of the run, to compare with")
    parser.add_argument(
        "--precision", default="", choices=("", "bf16", "fp8", "fp16", "fp32"), help="of the training"
    )
    parser.add_argument("--seed", type=int)
    parser.add_argument("--tag", action="append", default=[], help="may be repeated")
    parser.add_argument("--loss", default="", help="the metric that is the loss (default: by its name)")
    parser.add_argument("--step", type=int, help="of evaluations (default: in the checkpoint's name)")
    parser.add_argument("--step-column", default="", help="of plain tables (default: by its name)")
    parser.add_argument("--time-column", default="", help="the same for the time")
    parser.add_argument("--run", type=uuid.UUID, help="add the values to this run of the server")
    parser.add_argument("--copy", default="", help="any text: imports the files again as other runs")
    parser.add_argument(
        "--id", type=uuid.UUID, help="the id of the new run (default: computed from the file's run)"
    )
    parser.add_argument(
        "--root", type=Path, help="paths name runs from this folder on, so that it may be moved (default: /)"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what is in the files; send nothing")
    parser.add_argument("--url", help="the server's address (default: FP8SCOPE_URL, or `fp8scope login`)")
    parser.add_argument("--project", help="the project whose login to use")
    return parser


def _is_archive(path: Path) -> bool:
    """Return whether a file is an export of fp8scope, in CSV or Parquet."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(10)
        if head.startswith(b"#fp8scope "):
            return True
        if not head.startswith(b"PAR1"):
            return False
        # The description is in the footer, whose length is at the end.
        file.seek(max(0, path.stat().st_size - 8))
        length = int.from_bytes(file.read(4), "little")
        file.seek(max(0, path.stat().st_size - 8 - min(length, 64 << 20)))
        return b"\x08fp8scope" in file.read(min(length, 64 << 20))


class _Import:
    """One call of the command: its sources, one after the other."""

    def __init__(self, settings: Settings, options: argparse.Namespace) -> None:
        self._settings = settings
        self._options = options
        self._failed = 0
        self._runs = 0
        self._wishes = Wishes(
            name=options.name,
            group=options.group,
            baseline=options.baseline,
            precision=options.precision,
            seed=options.seed,
            tags=tuple(options.tag),
            run=options.run,
            id=options.id,
            copy=options.copy,
        )

    def run(self) -> int:
        """Import everything; a source that fails does not keep back the others. Returns the exit status."""
        for path, form in sources_of(self._options.path, self._options.format or ""):
            try:
                self._import(path, form)
            except (UnreadableError, TransferError, ValueError) as error:
                self._failed += 1
                print(f"fp8scope import: {path}: {error}", file=sys.stderr)
                if isinstance(error, TransferError) and error.code in (
                    "no_token",
                    "bad_token",
                    "forbidden",
                    "",
                ):
                    break
        return 1 if self._failed else 0

    def _import(self, path: Path, form: FileFormat) -> None:
        options = self._options
        source = ImportSource(
            path=path,
            loss=options.loss,
            step=options.step,
            step_column=options.step_column,
            time_column=options.time_column,
            root=options.root,
        )
        for run in form.read(source):
            self._runs += 1
            if options.id is not None and self._runs > 1:
                raise UnreadableError("--id is for a file with one run, and there are more")
            if options.dry_run:
                _describe(run, form)
            else:
                self._send(source, run, form)

    def _send(self, source: ImportSource, run: SourceRun, form: FileFormat) -> None:
        upload = ImportUpload(
            self._settings,
            run,
            run_id_of(form.name, run.key, self._wishes),
            self._wishes,
            format_name=form.name,
        )
        line = ProgressLine(f"importing {run.name[:40]}", unit="MiB" if source.total > 10 * MIB else "")
        try:
            for _ in upload.send():
                line.update(source.done, source.total)
        finally:
            line.end()
        sent = upload.sent
        what = _counts(sent.rows, sent.points, sent.evaluations, sent.media)
        print(f"{upload.page}  {run.name}: {'nothing new' if sent.is_nothing else what}")
        for note in dict.fromkeys(run.notes):
            print(f"  {note}", file=sys.stderr)


def _describe(run: SourceRun, form: FileFormat) -> None:
    """Print what is in a run, without sending it."""
    rows = points = evaluations = media = 0
    for part in run.parts:
        if isinstance(part, SourceEvaluation):
            evaluations += 1
            continue
        if isinstance(part, SourceMedia):
            media += 1
            continue
        rows += len(part.steps)
        points += sum(len(values) for values in part.scalars.values())
        points -= sum(int(missing.sum()) for missing in part.missing.values())
    print(f"{form.title}: {run.name}: {_counts(rows, points, evaluations, media)}")
    for note in dict.fromkeys(run.notes):
        print(f"  {note}", file=sys.stderr)


def _counts(rows: int, points: int, evaluations: int, media: int) -> str:
    what = f"{rows:,} rows, {points:,} values, {evaluations:,} evaluations"
    return f"{what}, {media:,} media" if media else what
