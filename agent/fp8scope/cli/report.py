"""`fp8scope report`: write the post-mortem of a run or of an incident."""

import argparse
import sys
import uuid
from pathlib import Path

from fp8scope.cli.server import server_settings
from fp8scope.config import ConfigurationError
from fp8scope.guard import configure_logging
from fp8scope.incidents.folder import IncidentError, StoredIncident
from fp8scope.postmortem.document import PostMortem
from fp8scope.postmortem.sources import RunSource, SourceError, from_incident


def report(arguments: list[str]) -> int:
    """Write the post-mortem of a run or of an incident."""
    parser = argparse.ArgumentParser(prog="fp8scope report", description=report.__doc__)
    parser.add_argument("source", metavar="RUN|INCIDENT", help="a run's id, or the folder of an incident")
    parser.add_argument(
        "-o", "--output", type=Path, help="the file to write, .html or .md (default: postmortem-….html)"
    )
    parser.add_argument("--url", help="the server's address (default: FP8SCOPE_URL, or `fp8scope login`)")
    parser.add_argument("--project", help="the project whose login to use")
    options = parser.parse_args(arguments)
    configure_logging()
    try:
        postmortem, name = _postmortem(options)
        path = options.output or Path(f"postmortem-{name}.html")
        write(postmortem, path)
    except (ConfigurationError, IncidentError, SourceError, OSError) as error:
        print(f"fp8scope report: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


def _postmortem(options: argparse.Namespace) -> tuple[PostMortem, str]:
    """The post-mortem, and a name for its file."""
    folder = Path(options.source)
    if folder.is_dir():
        return from_incident(StoredIncident(folder)), folder.resolve().name
    try:
        run = str(uuid.UUID(options.source))
    except ValueError:
        raise IncidentError(
            f"{options.source} is neither a run's id nor the folder of an incident."
        ) from None
    return RunSource(server_settings(options.url, options.project), run).postmortem(), run


def write(postmortem: PostMortem, path: Path) -> None:
    """Write a page, or Markdown with its figures beside it, by the suffix of the file."""
    if path.suffix != ".md":
        path.write_text(postmortem.html())
        return
    for figure in postmortem.figures:
        path.with_name(f"{path.stem}-{figure.name}.svg").write_text(figure.svg())
    path.write_text(postmortem.markdown(f"{path.stem}-"))
