"""The hash of passwords: Argon2id."""

from __future__ import annotations

from django.contrib.auth.hashers import Argon2PasswordHasher


class Argon2(Argon2PasswordHasher):
    """Argon2id with the first parameters that OWASP recommends: 46 MiB, one pass, one lane.

    The few hashing threads of accounts.passwords bound the memory; Django's 100 MiB with eight lanes would
    start eight threads for each attempt.
    """

    time_cost = 1
    memory_cost = 47_104
    parallelism = 1
