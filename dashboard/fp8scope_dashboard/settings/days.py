"""Numbers of days in environment variables."""

from __future__ import annotations

import os
import re
from typing import Final

from django.core.exceptions import ImproperlyConfigured

MAX_DAYS: Final = 36_500


def whole_days(variable: str, default: int = 0) -> int:
    """The whole number of days of a variable; `default` without one.

    Raises:
        ImproperlyConfigured: it is no whole number of at most MAX_DAYS.
    """
    text = os.environ.get(variable, "").strip() or str(default)
    if not re.fullmatch(r"[0-9]{1,5}", text, re.ASCII) or int(text) > MAX_DAYS:
        raise ImproperlyConfigured(f"{variable} must be a whole number of days, at most {MAX_DAYS:,}.")
    return int(text)
