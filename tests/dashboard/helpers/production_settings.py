"""The settings of the tests with features of production: slow hashes, a connection pool, known hosts."""

from fp8scope_dashboard.settings.test import *  # noqa: F403
from fp8scope_dashboard.settings.test import DATABASES

PASSWORD_HASHERS = [
    "django.contrib.auth.hashers.PBKDF2PasswordHasher",
    # The hasher of the test process, which creates the users.
    "django.contrib.auth.hashers.MD5PasswordHasher",
]
DATABASES["default"]["OPTIONS"] = {"pool": {"min_size": 1, "max_size": 16, "timeout": 5}}
ALLOWED_HOSTS = ["fp8.example.org", "127.0.0.1"]
