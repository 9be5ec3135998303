"""The `fp8scope` command.

The subcommands of the agent are listed in `BUILT_IN`. Other packages add subcommands through the entry point
group `fp8scope.commands`. A subcommand is a function of the argument list that returns the exit status; the
first line of its docstring is its help text.
"""

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from fp8scope.cli.doctor import doctor
from fp8scope.cli.export import export
from fp8scope.cli.import_run import import_
from fp8scope.cli.login import login
from fp8scope.cli.report import report
from fp8scope.cli.rules import rules
from fp8scope.cli.run_script import run
from fp8scope.cli.sync import sync
from fp8scope.metadata.environment import version_of

GROUP = "fp8scope.commands"

Command = Callable[[list[str]], int]


def bisect(arguments: list[str]) -> int:
    """Rank the matrix products of a training script by their FP8 error."""
    try:
        from fp8scope.cli.bisect import main
    except ModuleNotFoundError as error:
        raise UnavailableError(
            f"`fp8scope bisect` needs {error.name}, which is missing: pip install 'fp8scope[torch]'"
        ) from error
    return main(arguments)


def replay(arguments: list[str]) -> int:
    """Run a step of an incident again, in FP8 and in BF16."""
    try:
        from fp8scope.cli.replay import main
    except ModuleNotFoundError as error:
        raise UnavailableError(
            f"`fp8scope replay` needs {error.name}, which is missing: pip install 'fp8scope[torch]'"
        ) from error
    return main(arguments)


BUILT_IN: dict[str, Command] = {
    "bisect": bisect,
    "replay": replay,
    "report": report,
    "doctor": doctor,
    "login": login,
    "run": run,
    "sync": sync,
    "export": export,
    "import": import_,
    "rules": rules,
}


class UnavailableError(RuntimeError):
    """A subcommand lacks a package that it needs."""


def main(arguments: list[str] | None = None) -> int:
    """Run `fp8scope ARGUMENTS`; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"fp8scope {version_of('fp8scope')}")
        return 0
    name, rest = arguments[0], arguments[1:]
    try:
        command = find_command(name)
    except UnavailableError as error:
        print(f"fp8scope: {error}", file=sys.stderr)
        return 1
    if command is None:
        print(f"fp8scope: there is no command {name!r}.\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        return command(rest)
    except KeyboardInterrupt:
        if command is run:
            # It belongs to the script: the process ends as it would without fp8scope.
            raise
        return 130


def find_command(name: str) -> Command | None:
    """Return the subcommand `name`, or None. Raises UnavailableError if it cannot be imported."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    point = _installed().get(name)
    return None if point is None else load(point)


def load(point: EntryPoint) -> Command:
    """Import a subcommand. Raises UnavailableError, which says what to install, if a package is missing."""
    try:
        command: Command = point.load()
    except ModuleNotFoundError as error:
        extra = "torch" if error.name == "torch" else "dashboard"
        raise UnavailableError(
            f"`fp8scope {point.name}` needs {error.name}, which is missing: pip install 'fp8scope[{extra}]'"
        ) from error
    return command


def usage() -> str:
    """Return the help text: every subcommand with the first line of its docstring."""
    lines = ["usage: fp8scope COMMAND [OPTIONS]", "", "commands:"]
    helps = {name: _first_line(command) for name, command in BUILT_IN.items()}
    for name, point in _installed().items():
        try:
            helps[name] = _first_line(load(point))
        except UnavailableError as error:
            helps[name] = f"(not available: {str(error).partition(': ')[2]})"
    lines += [f"  {name:<10} {text}" for name, text in sorted(helps.items())]
    return "\n".join(
        [*lines, "", "Run `fp8scope COMMAND --help` for details, `fp8scope --version` for the version."]
    )


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _first_line(command: Command) -> str:
    return (command.__doc__ or "").strip().partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
