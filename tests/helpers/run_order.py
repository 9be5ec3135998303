"""The order of tests in parallel processes.

pytest-xdist's `worksteal` gives each process a part of equal length, in order. A process that is done takes
the second half of the longest part that is left. So what takes long begins each part. Parts end with short
tests, which processes share without waiting for each other, and no test begins last that takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, groupby
from typing import TypeVar

Test = TypeVar("Test")


def in_parts(
    tests: Sequence[Test],
    processes: int,
    *,
    file_of: Callable[[Test], str],
    browser: Callable[[Test], bool],
    long: Callable[[Test], bool],
) -> list[Test]:
    """Return the tests in an order in which each of `processes` parts begins with long ones.

    Files stay together. Tests of the browser begin the first half of the parts, other long tests the second
    half, so that not all processes run browsers at the same time.
    """
    rest = [test for test in tests if not (browser(test) or long(test))]
    heads: list[list[Test]] = [[] for _ in range(processes)]
    half = max(1, processes // 2)
    for kind, mine in ((browser, heads[:half]), (long, heads[half:] or heads)):
        chosen = [test for test in tests if kind(test) and not (kind is long and browser(test))]
        files = [list(group) for _, group in groupby(chosen, key=file_of)]
        for file in files:
            min(mine, key=len).extend(file)
    parts: list[list[Test]] = []
    for index, head in enumerate(heads):
        left = processes - index
        length = (len(tests) - sum(map(len, parts))) // left
        fill = max(0, length - len(head))
        parts.append(head + rest[:fill])
        rest = rest[fill:]
    return [*chain.from_iterable(parts), *rest]
