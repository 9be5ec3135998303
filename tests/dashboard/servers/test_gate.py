"""Children that start early wait until the gate is opened."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from fp8scope_dashboard.servers.children import Gate

CHILD = """
import sys
from fp8scope_dashboard.servers.children import wait_at_gate
print("imported", flush=True)
wait_at_gate(int(sys.argv[1]))
print("passed", flush=True)
"""


@pytest.fixture
def gate() -> Iterator[Gate]:
    with closing(Gate()) as gate:
        yield gate


def child_of(gate: Gate) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(gate.fd)]
    return subprocess.Popen(command, pass_fds=[gate.fd], stdout=subprocess.PIPE, text=True)


def test_it_works(gate: Gate) -> None:
    with child_of(gate) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "imported\n"
        passed: list[str] = []
        reader = threading.Thread(target=lambda: passed.append(child.stdout.readline()))  # type: ignore[union-attr]
        reader.start()
        reader.join(0.5)
        assert passed == []
        gate.open()
        reader.join(60)
        assert passed == ["passed\n"]
        assert child.wait(60) == 0


def test_a_child_passes_an_open_gate_at_once(gate: Gate) -> None:
    gate.open()
    with child_of(gate) as child:
        assert child.communicate(timeout=60)[0] == "imported\npassed\n"


def test_opening_twice_is_harmless(gate: Gate) -> None:
    gate.open()
    gate.open()
