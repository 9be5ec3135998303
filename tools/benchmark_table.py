"""Runs benchmarks, and writes their last results to benchmarks/results.json and docs/benchmarks.md.

    python tools/benchmark_table.py [NAME ...] [-- OPTIONS]

Each benchmark prints JSON lines, which are printed here, too. One that fails keeps its earlier result, and
the exit status is 1. OPTIONS go to every benchmark that is named. Without names, only the table is written.
"""

import ast
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results.json"
PAGE = ROOT / "docs" / "benchmarks.md"
MARK = "<!-- Written by tools/benchmark_table.py: everything below. -->\n"


def main(arguments: list[str]) -> int:
    """Run the named benchmarks and write the page; returns the exit status."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    names, options = arguments[:end], arguments[end + 1 :]
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failed = []
    for name in names:
        lines = run(name, options)
        if lines is None:
            failed.append(name)
            continue
        results[name] = {**circumstances(options), "lines": lines}
        # After each, since all of them take hours.
        RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
        write_page(results)
    write_page(results)
    if failed:
        print(f"failed, and kept at their earlier results: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def run(name: str, options: list[str]) -> list[dict[str, Any]] | None:
    """Run a benchmark and return its JSON lines; None if it fails or prints none."""
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *options]
    lines = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("{"):
                lines.append(json.loads(line))
    return lines if lines and process.returncode == 0 else None


def circumstances(options: list[str]) -> dict[str, Any]:
    """Return what a reader needs to judge or repeat a result."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    cores = len(os.sched_getaffinity(0))
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
        "machine": f"{cores} cores, {accelerator() or 'no GPU'}, Python {platform.python_version()}",
        "options": " ".join(options),
    }


def accelerator() -> str:
    """Return the name of the first GPU; an empty text where there is none or no driver."""
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""


def write_page(results: dict[str, Any]) -> None:
    """Write the table below the mark of docs/benchmarks.md; what is above it stays."""
    introduction = PAGE.read_text().partition(MARK)[0]
    sections = [section(name, results[name]) for name in sorted(results)]
    PAGE.write_text(introduction + MARK + "\n" + "\n".join(sections))


def section(name: str, result: dict[str, Any]) -> str:
    """Return a benchmark's heading, how it was run, and a table with a row for each figure of each line."""
    source = ROOT / "benchmarks" / f"{name}.py"
    about = (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n\n")[0]
    command = " ".join(filter(None, (f"python benchmarks/{name}.py", result["options"])))
    lines = [f"## {name}", "", " ".join(about.split()), ""]
    lines += [f"`{command}`: {result['date']}, commit {result['commit']}, {result['machine']}.", ""]
    cases = [case(line) for line in result["lines"]]
    columns = list(dict.fromkeys(key for figures in cases for key in figures))
    if len(cases) == 1:
        lines += [
            "| figure | value |",
            "|---|---|",
            *(f"| `{key}` | {value} |" for key, value in cases[0].items()),
        ]
    else:
        lines += [f"| {' | '.join(f'`{key}`' for key in columns)} |", "|" + "---|" * len(columns)]
        lines += [f"| {' | '.join(figures.get(key, '') for key in columns)} |" for figures in cases]
    return "\n".join([*lines, ""])


def case(line: dict[str, Any]) -> dict[str, str]:
    """Return the figures of a JSON line as texts: numbers with three digits, mappings entry by entry."""
    figures: dict[str, str] = {}
    for key, value in line.items():
        if isinstance(value, dict):
            figures |= {f"{key}.{inner}": text for inner, text in case(value).items()}
        elif isinstance(value, bool) or value is None or isinstance(value, int | str):
            figures[key] = "" if value is None else str(value).replace("|", "\\|")
        elif isinstance(value, float):
            figures[key] = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    figures.pop("benchmark", None)
    return figures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
