"""Hash passwords in a few low-priority threads, without holding a database connection."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from django.conf import settings
from django.contrib.auth.backends import ModelBackend
from django.contrib.auth.hashers import make_password, verify_password
from django.core.exceptions import PermissionDenied
from django.db import connection
from django.http import HttpRequest

from fp8scope_dashboard.accounts.models import User

Result = TypeVar("Result")

MAX_CONCURRENT: Final = max(1, min(4, (os.cpu_count() or 1) // 2))
NICENESS: Final = 10


def hashing(work: Callable[[], Result]) -> Result:
    """Run `work` in a hashing thread and return its result.

    `work` must not use the database, because the hashing threads never return connections. Raises what `work`
    raises.
    """
    return _threads.submit(work).result()


def encode(password: str) -> str:
    """Return the hash of a password, as it is stored. Releases the database connection meanwhile."""
    _release_connection()
    return hashing(partial(make_password, password))


def verify(password: str, encoded: str) -> tuple[bool, bool]:
    """Return whether the password matches, and whether its hash is outdated. Releases the connection."""
    _release_connection()
    return hashing(partial(verify_password, password, encoded))


def _release_connection() -> None:
    if not connection.in_atomic_block:
        connection.close()


def _give_way() -> None:
    """Lower the priority of this thread. Hashing releases the GIL, so nothing waits for it."""
    # On Linux, each thread has its own niceness.
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


_threads = ThreadPoolExecutor(MAX_CONCURRENT, thread_name_prefix="hash", initializer=_give_way)


class PasswordBackend(ModelBackend):
    """ModelBackend that holds no database connection while it hashes a password."""

    def authenticate(
        self,
        request: HttpRequest | None,
        username: str | None = None,
        password: str | None = None,
        **_: Any,
    ) -> User | None:
        """Return the user with this name and password; None if either is missing.

        Raises:
            PermissionDenied: passwords are switched off, they do not match, or the user is inactive. Stops
                further backends.
        """
        if username is None or password is None:
            return None
        if not settings.PASSWORDS:
            raise PermissionDenied
        user = User.objects.filter(username=username).first()
        if user is None:
            # Take as long as for a name that exists.
            encode(password)
            raise PermissionDenied
        is_right, is_outdated = verify(password, user.password)
        if not is_right or not self.user_can_authenticate(user):
            raise PermissionDenied
        if is_outdated:
            user.password = encode(password)
            user.save(update_fields=["password"])
        return user
