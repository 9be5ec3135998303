"""Network namespaces joined by links that delay, lose and cut packets.

Each machine of the rehearsal is a network namespace with a TUN device. A process of its own (`switch.py`)
reads the packets of all devices and writes each to the device of its destination, late or never. So TCP sees
what it would see on a bad network: retransmissions, and silence without a reset. `tc netem` does the same,
but needs a module of the kernel (sch_netem) that many virtual machines lack.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

MACHINES = {"app": "10.88.0.1", "primary": "10.88.0.2", "standby": "10.88.0.3", "training": "10.88.0.4"}


class NetworkError(RuntimeError):
    """The machine does not allow what the rehearsal needs."""


class Network:
    """The namespaces, as a context manager that removes them. Needs root and /dev/net/tun.

    Raises:
        NetworkError: namespaces or TUN devices cannot be made.
    """

    def __init__(self) -> None:
        self._names = {machine: f"fp8scope-{os.getpid()}-{machine}" for machine in MACHINES}
        self._switch: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
            raise NetworkError(
                "the rehearsal makes network namespaces and TUN devices: run it as root on Linux"
            )
        try:
            for name in self._names.values():
                _run("ip", "netns", "add", name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            self._switch = subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).with_name("switch.py")),
                    str(os.getpid()),
                    *MACHINES.values(),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert self._switch.stdout is not None
            devices = json.loads(self._switch.stdout.readline() or "[]")
            for device, (machine, address) in zip(devices, MACHINES.items(), strict=True):
                name = self._names[machine]
                _run("ip", "link", "set", device, "netns", name)
                _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", device)
                _run("ip", "-n", name, "link", "set", device, "up", "mtu", "1500", "txqueuelen", "10000")
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            self.close()
            detail = getattr(error, "stderr", "") or error
            raise NetworkError(f"network namespaces cannot be made: {detail}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the namespaces and what is left of their links."""
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()
        for name in self._names.values():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def inside(self, machine: str, command: list[str]) -> list[str]:
        """The command that runs `command` on a machine."""
        return ["ip", "netns", "exec", self._names[machine], *command]

    def set_link(
        self, one: str, other: str, *, delay: float = 0.0, loss: float = 0.0, is_cut: bool = False
    ) -> None:
        """Change the link between two machines, in both directions.

        Args:
            delay: seconds, each way.
            loss: share of the packets that are lost, each way.
            is_cut: every packet is lost.
        """
        rule = {"ends": [MACHINES[one], MACHINES[other]], "delay": delay, "loss": 1.0 if is_cut else loss}
        assert self._switch is not None and self._switch.stdin is not None and self._switch.stdout is not None
        self._switch.stdin.write(json.dumps(rule) + "\n")
        self._switch.stdin.flush()
        if not self._switch.stdout.readline():
            raise NetworkError("the switch of the rehearsal's network has ended")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
