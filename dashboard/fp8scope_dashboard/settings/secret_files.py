"""Read secrets from environment variables, or from the files that variables name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from django.core.exceptions import ImproperlyConfigured

MAX_BYTES: Final = 64 * 1024


def secret_from_environment(variable: str, default: str = "") -> str:
    """The secret in `variable`, or in the file that `variable`_FILE names; `default` without both.

    A line break at the end of the file does not belong to the secret.

    Raises:
        ImproperlyConfigured: both are set, or the file cannot be read, is empty or too large. The message
            never contains the secret.
    """
    name = f"{variable}_FILE"
    path = os.environ.get(name, "")
    if not path:
        return os.environ.get(variable, "") or default
    if os.environ.get(variable):
        raise ImproperlyConfigured(f"{variable} and {name} are both set: leave one of them out.")
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise ImproperlyConfigured(f"The file {path} of {name} cannot be read: {reason}.") from None
    if len(content) > MAX_BYTES:
        raise ImproperlyConfigured(f"The file {path} of {name} is larger than {MAX_BYTES >> 10} KiB.")
    secret = text.rstrip("\r\n")
    if not secret:
        raise ImproperlyConfigured(f"The file {path} of {name} is empty.")
    return secret
