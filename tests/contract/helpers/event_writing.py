"""A training that writes event files, as scripts do: python event_writing.py DIRECTORY STEPS KIND.

Writes some values a step, slowly enough to be followed, and flushes often.
"""

from __future__ import annotations

import math
import sys
import time


def main() -> None:
    directory, steps, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    first = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    if kind == "tensorboardX":
        from tensorboardX import SummaryWriter
    else:
        from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter(directory, flush_secs=1)
    for step in range(first, steps):
        writer.add_scalar("lm loss", 3 - step / steps + math.sin(step) / 9, step)
        writer.add_scalar("lm loss vs samples", 1.0, step * 512)
        writer.add_scalar("learning-rate", 1e-3 * step, step)
        if step % 10 == 0:
            writer.add_scalar("eval/accuracy", step / steps, step)
        if step % 7 == 0:
            writer.flush()
        time.sleep(0.004)
    writer.close()


if __name__ == "__main__":
    main()
