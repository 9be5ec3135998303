"""Passwords are hashed a few at a time, for each takes long, and without holding a database connection."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from django.contrib.auth.backends import ModelBackend
from django.contrib.auth.hashers import make_password, verify_password
from django.core.exceptions import PermissionDenied
from django.db import connection
from django.http import HttpRequest

from fp8scope_dashboard.accounts.models import User

Result = TypeVar("Result")

AT_A_TIME: Final = max(1, min(4, (os.cpu_count() or 1) // 2))
NICENESS: Final = 10


def hashing(work: Callable[[], Result]) -> Result:
    """Do `work`, which hashes a password, in one of the few threads for it, and wait for the result.

    It must not touch the database: its threads give no connection back. Raises what `work` raises.
    """
    return _threads.submit(work).result()


def encode(password: str) -> str:
    """The password's hash, as it is stored. Gives the database connection back for as long as it takes."""
    _release_connection()
    return hashing(partial(make_password, password))


def verify(password: str, encoded: str) -> tuple[bool, bool]:
    """Whether this is the password, and whether its hash is outdated. Gives the connection back, too."""
    _release_connection()
    return hashing(partial(verify_password, password, encoded))


def _release_connection() -> None:
    if not connection.in_atomic_block:
        connection.close()


def _give_way() -> None:
    """Let everything else go first: the hash itself runs without the interpreter's lock, so nobody waits for
    it."""
    # On Linux each thread has a niceness.
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


_threads = ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="hash", initializer=_give_way)


class PasswordBackend(ModelBackend):
    """Django's own, but that no database connection is held while a password is hashed."""

    def authenticate(
        self,
        request: HttpRequest | None,
        username: str | None = None,
        password: str | None = None,
        **_: Any,
    ) -> User | None:
        """The person with this name and password; None where a name or a password is not given.

        Raises:
            PermissionDenied: they do not match, or the person may not sign in: no other backend is to try.
        """
        if username is None or password is None:
            return None
        user = User.objects.filter(username=username).first()
        if user is None:
            # As long as for a name that exists.
            encode(password)
            raise PermissionDenied
        is_right, is_outdated = verify(password, user.password)
        if not is_right or not self.user_can_authenticate(user):
            raise PermissionDenied
        if is_outdated:
            user.password = encode(password)
            user.save(update_fields=["password"])
        return user
