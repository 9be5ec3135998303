"""A person who looks at a chart of a run again and again, through TLS.

    python visitor.py ADDRESS COOKIE STOP

Prints one JSON line when the file STOP exists: the answers by status, and the slowest in seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path

import urllib3

PAUSE_SECONDS = 0.25


def main(address: str, cookie: str, stop: Path) -> None:
    """Ask until told to stop."""
    answers: Counter[str] = Counter()
    slowest = 0.0
    pool = urllib3.PoolManager(retries=False, timeout=60)
    while not stop.exists():
        began = time.monotonic()
        try:
            answer = pool.request("GET", address, headers={"Cookie": cookie}, redirect=False)
            answers[str(answer.status)] += 1
        except urllib3.exceptions.HTTPError as error:
            answers[type(error).__name__] += 1
        slowest = max(slowest, time.monotonic() - began)
        time.sleep(PAUSE_SECONDS)
    print(json.dumps({"answers": dict(answers), "slowest_s": round(slowest, 2)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
