"""The `fp8scope` command.

The subcommands of the agent are listed in `BUILT_IN`. Other packages add subcommands through the entry point
group `fp8scope.commands`. A subcommand is a function of the argument list that returns the exit status; the
first line of its docstring is its help text.
"""

import importlib
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from fp8scope.metadata.environment import version_of

GROUP = "fp8scope.commands"

Command = Callable[[list[str]], int]


def _later(name: str, module: str, function: str, summary: str) -> Command:
    """Return a subcommand that is imported when it is called, so that a broken package breaks no other."""

    def command(arguments: list[str]) -> int:
        try:
            implementation: Command = getattr(importlib.import_module(f"fp8scope.cli.{module}"), function)
        except ImportError as error:
            raise MissingPackageError(_missing(name, error)) from error
        return implementation(arguments)

    command.__doc__ = summary
    return command


def _missing(name: str, error: ImportError) -> str:
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        install = "'fp8scope[torch]'" if package == "torch" else package
        return f"`fp8scope {name}` needs {package}, which is missing: pip install {install}"
    return f"`fp8scope {name}` cannot begin: {' '.join(str(error).split())}"


BUILT_IN: dict[str, Command] = {
    name: _later(name, *what)
    for name, what in {
        "advise": ("advise", "advise", "Say how a recorded training could be faster, from twelve practices."),
        "bisect": ("bisect", "main", "Rank the matrix products of a training script by their FP8 error."),
        "evaluate": ("evaluate", "main", "Evaluate checkpoints in BF16, FP8, FP6, INT8, INT4 and NVFP4."),
        "certify": (
            "certify",
            "certify",
            "Write the signed verdict on two groups of runs.",
        ),
        "check": (
            "certify",
            "check",
            "Exit with 0 if FP8 is equivalent or better, else with 1 or 3.",
        ),
        "replay": ("replay", "main", "Run a step of an incident again, in FP8 and in BF16."),
        "report": ("report", "report", "Write the post-mortem of a run or of an incident."),
        "doctor": (
            "doctor",
            "doctor",
            "Check whether runs on this machine will be recorded, and say what to do if not.",
        ),
        "login": ("login", "login", "Store a server's address and token for this user's training scripts."),
        "run": ("run_script", "run", "Run an unmodified training script and record it."),
        "plan": (
            "plan",
            "plan",
            "Split a pipeline by measured costs, or predict a step's time by its transfers.",
        ),
        "runs": ("reading.runs", "runs", "List the runs that a search finds."),
        "show": (
            "reading.show",
            "show",
            "Show a run: its verdict, its loss, its worst tensors and its alerts.",
        ),
        "compare": (
            "reading.compare",
            "compare",
            "Compare a run with its baseline: verdict, difference, interval, seeds and scores.",
        ),
        "tail": ("reading.tail", "tail", "Follow a run: its new steps and alerts, until it ends."),
        "media": (
            "reading.media",
            "media",
            "List the images, texts, tables and files of a run, or save them.",
        ),
        "card": ("reading.media", "card", "Write a section for a model card: what was measured of a run."),
        "alerts": ("reading.alerts", "alerts", "List alerts, the newest first."),
        "open": ("reading.open_page", "open_page", "Open the page of a run in a browser."),
        "completion": (
            "reading.completion",
            "completion",
            "Print the script that completes commands in a shell.",
        ),
        "mcp": ("mcp", "mcp", "Serve the project to an agent by the Model Context Protocol."),
        "remote-write": (
            "remote_write",
            "remote_write",
            "Send the latest values of runs to Prometheus, again and again.",
        ),
        "sync": ("sync", "sync", "Send the runs that are kept in a spool directory."),
        "export": ("export", "export", "Download a run, or write it for TensorBoard, W&B or MLflow."),
        "import": (
            "import_command",
            "import_",
            "Upload runs from files of other tools, or a run that `fp8scope export` wrote.",
        ),
        "rules": ("rules", "rules", "Write a project's alert rules to a YAML file, or apply one to it."),
    }.items()
}


class MissingPackageError(RuntimeError):
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
    except MissingPackageError as error:
        print(f"fp8scope: {error}", file=sys.stderr)
        return 1
    if command is None:
        print(f"fp8scope: there is no command {name!r}.\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        return command(rest)
    except MissingPackageError as error:
        print(f"fp8scope: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if name == "run":
            # It belongs to the script: the process ends as it would without fp8scope.
            raise
        return 130


def find_command(name: str) -> Command | None:
    """Return the subcommand `name`, or None. Raises MissingPackageError if it cannot be imported."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    point = _installed().get(name)
    return None if point is None else load(point)


def all_commands() -> dict[str, Command]:
    """Every subcommand that can be imported, by its name."""
    commands = dict(BUILT_IN)
    for name, point in _installed().items():
        try:
            commands[name] = load(point)
        except MissingPackageError:
            continue
    return dict(sorted(commands.items()))


def load(point: EntryPoint) -> Command:
    """Import a subcommand. Raises MissingPackageError if a package is missing; it says what to install."""
    try:
        command: Command = point.load()
    except ModuleNotFoundError as error:
        extra = "torch" if error.name == "torch" else "dashboard"
        raise MissingPackageError(
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
        except MissingPackageError as error:
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
