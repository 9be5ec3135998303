"""The process that carries packets between the TUN devices of `network.py`.

    python switch.py PREFIX ADDRESS...

Makes one device for each address, prints their names as a JSON list, and reads rules from standard input, one
JSON object a line: `{"ends": [ADDRESS, ADDRESS], "delay": SECONDS, "loss": SHARE}`. It answers each with a
line and ends with its standard input.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import sys
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MAX_PACKET_BYTES = 65536
# A real queue is bounded as well.
MAX_LATE_PACKETS = 50_000
# Where an IPv4 header has the two addresses.
SOURCE, DESTINATION, HEADER_BYTES = slice(12, 16), slice(16, 20), 20


def open_device(name: str) -> int:
    """Make a TUN device. Returns the descriptor that reads and writes its packets."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return descriptor


class Switch:
    """Carries packets by their destination, under the rules of each pair of addresses."""

    def __init__(self, devices: dict[bytes, int]) -> None:
        self._devices = devices
        self._rules: dict[frozenset[bytes], tuple[float, float]] = {}
        self._late: list[tuple[float, int, int, bytes]] = []
        self._number = 0

    def set_rule(self, ends: list[str], delay: float, loss: float) -> None:
        self._rules[frozenset(map(socket.inet_aton, ends))] = (delay, loss)

    def pause(self) -> float:
        """Seconds until the next late packet is due, at most one."""
        return min(1.0, max(0.0, self._late[0][0] - time.monotonic())) if self._late else 1.0

    def deliver_due(self) -> None:
        now = time.monotonic()
        while self._late and self._late[0][0] <= now:
            _, _, device, packet = heapq.heappop(self._late)
            self._write(device, packet)

    def take(self, device: int) -> None:
        """Read the packets that wait on a device, and send each on its way."""
        for _ in range(256):
            try:
                packet = os.read(device, MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            target = self._devices.get(packet[DESTINATION]) if len(packet) >= HEADER_BYTES else None
            # Whatever is not for another machine, such as IPv6, goes nowhere.
            if target is None or packet[0] >> 4 != 4:
                continue
            delay, loss = self._rules.get(frozenset((packet[SOURCE], packet[DESTINATION])), (0.0, 0.0))
            if loss and random.random() < loss:
                continue
            if not delay:
                self._write(target, packet)
            elif len(self._late) < MAX_LATE_PACKETS:
                self._number += 1
                heapq.heappush(self._late, (time.monotonic() + delay, self._number, target, packet))

    def _write(self, device: int, packet: bytes) -> None:
        try:
            os.write(device, packet)
        except OSError:
            # The device is down, or its queue is full: the packet is lost, as on any network.
            return


def main(prefix: str, addresses: list[str]) -> None:
    """Carry packets until standard input ends."""
    names = [f"fp8-{prefix}-{number}" for number in range(len(addresses))]
    descriptors = [open_device(name) for name in names]
    switch = Switch(dict(zip(map(socket.inet_aton, addresses), descriptors, strict=True)))
    print(json.dumps(names), flush=True)
    poll = select.epoll()
    for descriptor in (*descriptors, sys.stdin.fileno()):
        poll.register(descriptor, select.EPOLLIN)
    while True:
        for descriptor, _ in poll.poll(switch.pause()):
            if descriptor != sys.stdin.fileno():
                switch.take(descriptor)
            elif not (line := sys.stdin.readline()):
                return
            else:
                switch.set_rule(**json.loads(line))
                print("changed", flush=True)
        switch.deliver_due()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
