"""`fp8scope certify` and `fp8scope check`: the signed verdict on two groups of runs, as files and for CI."""

import argparse
import json
import math
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fp8scope.cli.server import server_settings
from fp8scope.client.connection import ClientError, Connection
from fp8scope.client.plain_text import printable
from fp8scope.config import ConfigurationError
from fp8scope.guard import configure_logging

PASSES: Final = 0
FAILS: Final = 1
UNDECIDED: Final = 3
"""Of `fp8scope check`. 2 is the status of wrong arguments."""
STATUS: Final[Mapping[str, int]] = {"pass": PASSES, "fail": FAILS, "undecided": UNDECIDED}
FORMS: Final[Mapping[str, str]] = {
    "html": "text/html",
    "markdown": "text/markdown",
    "junit": "application/xml",
}
MAX_PAGES: Final = 100


def certify(arguments: list[str]) -> int:
    """Write the signed verdict on a group of runs and its baseline: a file, and one page."""
    parser = _parser("certify", certify.__doc__)
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("certificate.json"), help="default: %(default)s"
    )
    parser.add_argument("--html", type=Path, help="the page (default: beside the file, with .html)")
    options = parser.parse_args(arguments)
    page = options.html or options.output.with_suffix(".html")
    return _run("certify", options, {options.output: "json", page: "html"})


def check(arguments: list[str]) -> int:
    """Exit with 0 if a group of runs is equivalent to its baseline or better, 1 if worse, 3 if undecided."""
    parser = _parser("check", check.__doc__)
    parser.add_argument("--junit", type=Path, help="write the outcome as JUnit XML")
    parser.add_argument("--markdown", type=Path, help="write it as Markdown, for a comment or a summary")
    parser.add_argument("--certificate", type=Path, help="write the signed file, too")
    parser.add_argument(
        "--undecided",
        choices=("fail", "pass"),
        default="fail",
        help="what 'cannot tell yet' means: exit status 3, or 0 (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    files = {options.junit: "junit", options.markdown: "markdown", options.certificate: "json"}
    status = _run("check", options, {path: form for path, form in files.items() if path is not None})
    return PASSES if status == UNDECIDED and options.undecided == "pass" else status


def _parser(name: str, about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"fp8scope {name}", description=about)
    parser.add_argument("judged", metavar="FP8_GROUP", help="a group of runs, or the id of one")
    parser.add_argument("baseline", metavar="BF16_GROUP", help="the group, or the run, to compare it with")
    margin = parser.add_mutually_exclusive_group()
    margin.add_argument(
        "--margin", type=_share, help="difference that counts as none: 0.5%% or 0.005 (default: the run's)"
    )
    margin.add_argument("--margin-nats", type=_nats, help="the same in the unit of the loss: 0.01")
    parser.add_argument("--url", help="the server's address (default: FP8SCOPE_URL, or `fp8scope login`)")
    parser.add_argument("--project", help="the project whose login to use")
    return parser


def _share(text: str) -> float:
    value = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    if not 1e-6 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0.0001% and 100%")
    return value


def _nats(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and 1e-6 <= value <= 100.0):
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0.000001 and 100")
    return value


def _run(name: str, options: argparse.Namespace, files: Mapping[Path, str]) -> int:
    configure_logging()
    try:
        server = _Server(Connection(server_settings(options.url, options.project)))
        run = server.run_named(options.judged, options.baseline)
        query = {name: getattr(options, name) for name in ("baseline", "margin", "margin_nats")}
        document = server.certificate(run, query)
        for path, form in files.items():
            _write(path, _text(document) if form == "json" else server.form(run, query, form))
    except (ConfigurationError, ClientError, OSError) as error:
        print(f"fp8scope {name}: {error}", file=sys.stderr)
        return FAILS
    print(_told(document["claim"]))
    for path in files:
        print(f"{path}: written", file=sys.stderr)
    return PASSES if name == "certify" else STATUS.get(document["claim"].get("outcome"), FAILS)


def _text(document: Mapping[str, Any]) -> str:
    """The certificate as its file: the signature is over the values, not over this text."""
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _told(claim: Mapping[str, Any]) -> str:
    sentences = [str(claim[name]) for name in ("explanation", "reason", "covers") if claim.get(name)]
    return printable(f"{claim.get('verdict')}: {' '.join(sentences)}")


def _write(path: Path, content: str) -> None:
    draft = path.with_name(f"{path.name}.part")
    draft.write_text(content, encoding="utf-8")
    draft.replace(path)


@dataclass(frozen=True)
class _Server:
    """The server's API, as far as certificates need it."""

    connection: Connection

    def run_named(self, judged: str, baseline: str) -> str:
        """Return the id of a run of a group, the newest that names this baseline, else the newest.

        Raises ClientError if there is none.
        """
        try:
            return str(uuid.UUID(judged))
        except ValueError:
            pass
        members = self._members(judged)
        if not members:
            raise ClientError(f"the project has no run of the group {judged!r}")
        named = [run for run in members if run.get("baseline") == baseline]
        return str((named or members)[0]["id"])

    def _members(self, group: str) -> list[dict[str, Any]]:
        """The runs of a group on the first page that has any."""
        offset = 0
        for _ in range(MAX_PAGES):
            query = {"q": f'group:"{group}"' if '"' not in group else "", "offset": offset}
            answer = self.connection.json("/runs", query)
            members = [run for run in answer["runs"] if run.get("group") == group]
            offset += len(answer["runs"])
            if members or not answer["runs"] or offset >= answer["total"]:
                return members
        return []

    def certificate(self, run: str, query: Mapping[str, Any]) -> dict[str, Any]:
        """Return the signed certificate of a run. Raises ClientError."""
        document = self.connection.json(f"/runs/{run}/certificate", query)
        if not isinstance(document.get("claim"), dict):
            raise ClientError("the server's answer is no certificate")
        return document

    def form(self, run: str, query: Mapping[str, Any], form: str) -> str:
        """Return another form of it. Raises ClientError."""
        return self.connection.text(f"/runs/{run}/certificate", {**query, "format": form}, FORMS[form])
