"""`fp8scope media` and `fp8scope card`: what a run has logged beside its numbers, and its model card."""

import argparse
import re
from dataclasses import asdict
from pathlib import Path

from fp8scope.cli.reading.common import OK, answered, client_of, parser_of, write_json
from fp8scope.cli.reading.printing import count
from fp8scope.cli.reading.terminal import TableCell, TableColumn, Terminal
from fp8scope.client import ClientError, StoredMedia
from fp8scope.client.plain_text import printable

COLUMNS = (
    TableColumn(title="name", gives=True),
    TableColumn(title="kind"),
    TableColumn(title="step", is_number=True),
    TableColumn(title="bytes", is_number=True, rank=1),
    TableColumn(title="SHA-256", rank=2),
    TableColumn(title="caption", gives=True, rank=3),
)
ENDINGS = {"text": ".txt", "table": ".json"}
_UNSAFE = re.compile(r"[^\w.\-]+")


def media(arguments: list[str]) -> int:
    """List the images, texts, tables and files of a run, or save them."""
    parser = parser_of("media", media.__doc__)
    parser.add_argument("run", help="the name or the id of a run")
    parser.add_argument("name", nargs="?", default="", help="only those of this name")
    parser.add_argument("--kind", default="", choices=("image", "text", "table", "file"), help="one kind")
    parser.add_argument("--first", type=int, help="the first step")
    parser.add_argument("--last", type=int, help="the last step")
    parser.add_argument("-o", "--output", type=Path, help="save the contents in this folder")
    options = parser.parse_args(arguments)
    return answered("media", lambda: _media(options))


def _media(options: argparse.Namespace) -> int:
    run = client_of(options).run(options.run)
    listed = run.media(options.name, kind=options.kind, first=options.first, last=options.last)
    if options.output is not None:
        for item in listed:
            print(printable(str(_save(item, options.output))))
        return OK
    if options.json:
        write_json([_facts(item) for item in listed])
        return OK
    if not listed:
        print("The run has no such media.")
        return OK
    terminal = Terminal()
    terminal.table(list(COLUMNS), [_row(item) for item in listed])
    terminal.flush()
    return OK


def _facts(item: StoredMedia) -> dict[str, object]:
    return {name: value for name, value in asdict(item).items() if name != "read"}


def _row(item: StoredMedia) -> list[TableCell]:
    return [
        TableCell(printable(item.name), "strong"),
        TableCell(item.kind),
        TableCell(count(item.step)),
        TableCell(count(item.size)),
        TableCell(item.sha256[:12], "muted"),
        TableCell(printable(item.caption or item.file_name)),
    ]


def _save(item: StoredMedia, folder: Path) -> Path:
    """Write a content under a name that says what it is; a name of a run never leaves the folder."""
    ending = f".{item.type.partition('/')[2]}" if item.type else ENDINGS.get(item.kind, "")
    if item.kind == "file":
        ending = Path(item.file_name).suffix
    stem = _UNSAFE.sub("_", item.name).strip("._") or "media"
    path = folder / f"{stem}-{item.step}-{item.id}{_UNSAFE.sub('_', ending)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(item.content())
    except OSError as error:
        raise ClientError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def card(arguments: list[str]) -> int:
    """Write a section for a model card: what was measured of a run."""
    parser = parser_of("card", card.__doc__)
    parser.add_argument("run", help="the name or the id of a run")
    options = parser.parse_args(arguments)
    return answered("card", lambda: _card(options))


def _card(options: argparse.Namespace) -> int:
    text = client_of(options).run(options.run).card()
    if options.json:
        write_json({"markdown": text})
        return OK
    # Names in it come from the server: no control characters reach the terminal.
    for line in text.splitlines():
        print(printable(line))
    return OK
