"""`fp8scope certify` and `fp8scope check`: the signed verdict on two groups of runs, as files and for CI."""

import argparse
import json
import math
import sys
import urllib.parse
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import urllib3

from fp8scope.cli.server import TransferError, server_settings
from fp8scope.config import ConfigurationError, Settings
from fp8scope.delivery.transport import classify
from fp8scope.guard import configure_logging

PASSES: Final = 0
FAILS: Final = 1
UNDECIDED: Final = 3
"""Of `fp8scope check`. 2 is the status of wrong arguments."""
STATUS: Final[Mapping[str, int]] = {"pass": PASSES, "fail": FAILS, "undecided": UNDECIDED}
OUTCOME: Final = "X-Fp8scope-Outcome"
MAX_BYTES: Final = 512 << 20
MAX_PAGES: Final = 100
READ_SECONDS: Final = 300


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
        server = _Server(server_settings(options.url, options.project))
        run = server.run_named(options.judged, options.baseline)
        fields: dict[str, Any] = {"baseline": options.baseline}
        for field in ("margin", "margin_nats"):
            if (value := getattr(options, field)) is not None:
                fields[field] = repr(value)
        body, outcome = server.certificate(run, fields | {"format": "json"})
        claim = _claim_of(body)
        for path, form in files.items():
            content = body if form == "json" else server.certificate(run, fields | {"format": form})[0]
            _write(path, content)
    except (ConfigurationError, TransferError, OSError) as error:
        print(f"fp8scope {name}: {error}", file=sys.stderr)
        return FAILS
    print(_told(claim))
    for path in files:
        print(f"{path}: written", file=sys.stderr)
    return PASSES if name == "certify" else STATUS.get(outcome, FAILS)


def _claim_of(body: bytes) -> dict[str, Any]:
    try:
        claim: dict[str, Any] = json.loads(body)["claim"]
        return claim
    except (ValueError, KeyError, TypeError):
        raise TransferError("the server's answer is no certificate") from None


def _told(claim: Mapping[str, Any]) -> str:
    sentences = [str(claim[name]) for name in ("explanation", "reason", "covers") if claim.get(name)]
    text = f"{claim.get('verdict')}: {' '.join(sentences)}"
    # Names of runs are data: none moves the cursor.
    return "".join(character if character.isprintable() else " " for character in text)


def _write(path: Path, content: bytes) -> None:
    draft = path.with_name(f"{path.name}.part")
    draft.write_bytes(content)
    draft.replace(path)


@dataclass(frozen=True)
class _Server:
    """The server's API, as far as certificates need it."""

    settings: Settings

    def run_named(self, judged: str, baseline: str) -> str:
        """Return the id of a run of a group, the newest that names this baseline, else the newest.

        Raises TransferError if there is none.
        """
        try:
            return str(uuid.UUID(judged))
        except ValueError:
            pass
        members = list(self._members(judged))
        if not members:
            raise TransferError(f"the project has no run of the group {judged!r}")
        named = [run for run in members if run.get("baseline") == baseline]
        return str((named or members)[0]["id"])

    def _members(self, group: str) -> Sequence[dict[str, Any]]:
        members: list[dict[str, Any]] = []
        offset = 0
        for _ in range(MAX_PAGES):
            fields = {"q": f'group:"{group}"' if '"' not in group else "", "offset": offset}
            answer = json.loads(self._get("runs", fields)[0])
            members += [run for run in answer["runs"] if run.get("group") == group]
            offset += len(answer["runs"])
            if members or not answer["runs"] or offset >= answer["total"]:
                break
        return members

    def certificate(self, run: str, fields: Mapping[str, Any]) -> tuple[bytes, str]:
        """Return a form of the certificate of a run, and its outcome. Raises TransferError."""
        body, headers = self._get(f"runs/{run}/certificate", fields)
        return body, str(headers.get(OUTCOME, ""))

    def _get(self, path: str, fields: Mapping[str, Any]) -> tuple[bytes, Mapping[str, str]]:
        settings = self.settings
        address = f"{settings.url}/api/v1/{path}?{urllib.parse.urlencode(fields)}"
        pool = urllib3.PoolManager(
            retries=False, timeout=urllib3.Timeout(settings.connect_timeout, read=READ_SECONDS)
        )
        try:
            answer = pool.request(
                "GET",
                address,
                headers={"Authorization": f"Bearer {settings.token}"},
                preload_content=False,
            )
            body = answer.read(MAX_BYTES + 1)
        except urllib3.exceptions.HTTPError as error:
            raise TransferError(f"{settings.url}: {type(error).__name__}; try again") from None
        if answer.status != 200:
            outcome = classify(answer.status, answer.headers, body[: 1 << 16])
            raise TransferError(outcome.message or f"HTTP {answer.status}")
        if len(body) > MAX_BYTES:
            raise TransferError(f"the answer is larger than {MAX_BYTES >> 20} MiB")
        return body, answer.headers
