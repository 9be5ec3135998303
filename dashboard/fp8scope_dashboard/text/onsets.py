"""The step at which something begins, in words: the one form of it in messages and on pages."""

from __future__ import annotations


def steps_in_words(step: int, after: int | None = None) -> str:
    """`310`; `301–310` if it was not observed in every step; `310 or before` if nothing was judged before.

    Args:
        step: the first step at which it was seen.
        after: the last step before that at which it was looked for and not seen; negative if it was never
            looked for; None if that is not known.
    """
    if after is None or after == step - 1 or after >= step:
        return f"{step:,}"
    if after < 0:
        return f"{step:,} or before" if step > 1 else f"{step:,}"
    return f"{after + 1:,}–{step:,}"
