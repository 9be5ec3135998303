"""`fp8scope open`: the page of a run in a browser."""

import argparse
import os
import sys
import webbrowser

from fp8scope.cli.reading.common import OK, answered, client_of, parser_of, write_json
from fp8scope.client.plain_text import printable


def open_page(arguments: list[str]) -> int:
    """Open the page of a run in a browser; without a browser, print its address."""
    parser = parser_of("open", open_page.__doc__)
    parser.add_argument("run", help="the name or the id of a run")
    options = parser.parse_args(arguments)
    return answered("open", lambda: _open(options))


def _open(options: argparse.Namespace) -> int:
    url = client_of(options).run(options.run).url
    # It comes from the server, and a browser also takes addresses of files.
    is_page = url.startswith(("http://", "https://"))
    is_opened = is_page and has_browser() and webbrowser.open(url)
    if options.json:
        write_json({"url": url, "opened": is_opened})
    else:
        print(printable(url))
    return OK


def has_browser() -> bool:
    """Return whether a browser with windows can be opened. One in the terminal would take it over."""
    if sys.platform in ("darwin", "win32"):
        return True
    if not any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")):
        return False
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True
