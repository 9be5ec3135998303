"""The settings of the tests with features of production: slow hashes, a connection pool, known hosts."""

from django.contrib.auth.hashers import PBKDF2PasswordHasher

from fp8scope_dashboard.settings.test import *  # noqa: F403
from fp8scope_dashboard.settings.test import DATABASES


class SlowHasher(PBKDF2PasswordHasher):
    """Slow in comparison with everything else that a request does, but not as slow as in production."""

    iterations = PBKDF2PasswordHasher.iterations // 4


PASSWORD_HASHERS = [
    "dashboard.helpers.production_settings.SlowHasher",
    # The hasher of the test process, which creates the users.
    "django.contrib.auth.hashers.MD5PasswordHasher",
]
DATABASES["default"]["OPTIONS"] = {"pool": {"min_size": 1, "max_size": 16, "timeout": 5}}
ALLOWED_HOSTS = ["fp8.example.org", "127.0.0.1"]
