"""`fp8scope completion`: a script that completes commands, options and names of runs in a shell.

Commands and options are written into the script, so that completing them starts no Python. Names of runs come
from the server, by `fp8scope completion --runs`, which waits for a second at most.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Final, NoReturn

from fp8scope.cli.reading.common import OK, WRONG_USE
from fp8scope.cli.reading.scripts import BASH, FISH, FISH_OPTION, FISH_RUNS, FISH_WORD, ZSH
from fp8scope.client import Client, ClientError
from fp8scope.config import ConfigurationError

SECONDS: Final = 1.0
MAX_NAMES: Final = 50
TAKES_RUNS: Final = ("alerts", "card", "compare", "export", "media", "open", "report", "show", "tail")
"""Commands with the name or the id of a run."""
TAKES_IDS: Final = ("export", "report")
"""Those of them that take only ids."""
SCRIPTS: Final = ("bash", "zsh", "fish")


def completion(arguments: list[str]) -> int:
    """Print the script that completes commands, options and names of runs."""
    parser = argparse.ArgumentParser(
        prog="fp8scope completion",
        description=completion.__doc__,
        epilog="For bash: fp8scope completion bash > ~/.local/share/bash-completion/completions/fp8scope. "
        "docs/client.md has the other shells.",
    )
    parser.add_argument("shell", nargs="?", choices=SCRIPTS)
    parser.add_argument("--runs", metavar="BEGINNING", help="print names of runs that begin like this")
    parser.add_argument("--ids", action="store_true", help="with --runs: print ids")
    options = parser.parse_args(arguments)
    if options.runs is not None:
        print_runs(options.runs, ids=options.ids)
        return OK
    if options.shell is None:
        parser.print_usage(sys.stderr)
        return WRONG_USE
    sys.stdout.write(script(options.shell, words_of_commands()))
    return OK


def print_runs(beginning: str, *, ids: bool) -> None:
    """Print the names, or ids, of the newest runs that begin like this. Nothing if the server is slow."""
    try:
        client = Client(timeout=SECONDS, patience=0.0)
        search = "" if ids else f'name:"{quoted(beginning)}"' if beginning else ""
        for run in islice(client.runs(search), MAX_NAMES):
            text = run.id if ids else run.name
            # A name that a shell cannot take as it is would be another word, or a command.
            if text.startswith(beginning) and text.isprintable():
                print(text)
    except (ClientError, ConfigurationError):
        return


def quoted(text: str) -> str:
    """A text for between the quotes of a search."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


class _ParserMadeError(Exception):
    """Carries the parser of a command out of it."""


def words_of_commands() -> dict[str, list[str]]:
    """The options and actions of each command; none of one whose packages are missing."""
    from fp8scope.cli.main import all_commands  # main lists this module.

    words = {}
    for name, command in all_commands().items():
        parser = _parser_of(command)
        words[name] = [] if parser is None else sorted(_words(parser))
    return words


def _parser_of(command: Any) -> argparse.ArgumentParser | None:
    """The parser that a command makes before anything else. It is stopped where it parses."""

    def stop(parser: argparse.ArgumentParser, *arguments: object, **named: object) -> NoReturn:
        raise _ParserMadeError(parser)

    methods = ("parse_args", "parse_known_args")
    before = {name: getattr(argparse.ArgumentParser, name) for name in methods}
    try:
        for name in methods:
            setattr(argparse.ArgumentParser, name, stop)
        command([])
    except _ParserMadeError as made:
        parser: argparse.ArgumentParser = made.args[0]
        return parser
    except Exception:
        # A package is missing: the command says so when somebody calls it.
        return None
    finally:
        for name, method in before.items():
            setattr(argparse.ArgumentParser, name, method)
    return None


def _words(parser: argparse.ArgumentParser) -> set[str]:
    words: set[str] = set()
    for action in parser._actions:
        words.update(option for option in action.option_strings if option.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                words |= {name, *_words(sub)}
        elif not action.option_strings and action.choices is not None:
            words.update(map(str, action.choices))
    return words


def script(shell: str, words: Mapping[str, Sequence[str]]) -> str:
    """The script of a shell for these commands."""
    if shell == "fish":
        return _fish(words)
    text, variable = (BASH, "words") if shell == "bash" else (ZSH, "words_of")
    cases = "\n".join(
        f"    {name}) {variable}={_single(' '.join(listed))} ;;" for name, listed in words.items()
    )
    fields = {
        "@COMMANDS@": _single(" ".join(sorted(words))),
        "@CASES@": cases,
        "@NAMED@": "|".join(TAKES_RUNS),
        "@IDS@": "|".join(TAKES_IDS),
    }
    for field, value in fields.items():
        text = text.replace(field, value)
    return text


def _fish(words: Mapping[str, Sequence[str]]) -> str:
    lines = [FISH.replace("@COMMANDS@", _single(" ".join(sorted(words))))]
    for name, listed in words.items():
        for word in listed:
            kind = FISH_OPTION if word.startswith("--") else FISH_WORD
            lines.append(kind.replace("@COMMAND@", name).replace("@WORD@", word.removeprefix("--")))
    for name in TAKES_RUNS:
        ids = " --ids" if name in TAKES_IDS else ""
        lines.append(FISH_RUNS.replace("@COMMAND@", name).replace("@IDS@", ids))
    return "\n".join(lines) + "\n"


def _single(text: str) -> str:
    """A text in single quotes, for all three shells."""
    return "'" + text.replace("'", "") + "'"
