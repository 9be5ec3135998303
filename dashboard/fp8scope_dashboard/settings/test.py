"""Settings of the test suite: the real PostgreSQL and Redis that tests/conftest.py starts."""

import os
import re
import secrets
import tempfile
from pathlib import Path

os.environ.setdefault("FP8SCOPE_BASE_URL", "http://localhost")
# All processes of a test decrypt what one of them encrypts.
os.environ.setdefault("FP8SCOPE_SECRET_KEY", "only-for-tests-" * 4)
# The receivers of the tests are on this machine.
os.environ.setdefault("FP8SCOPE_CHANNEL_NETWORKS", "127.0.0.1, ::1")

# Where DATABASE_URL and REDIS_URL are not set: addresses of servers that do not run yet. tests/conftest.py
# starts them when the chosen tests need them. Through the environment all processes of the session agree.
if "DATABASE_URL" not in os.environ or "REDIS_URL" not in os.environ:
    from fp8scope_dashboard.embedded.postgres import EmbeddedPostgres
    from fp8scope_dashboard.embedded.redis import EmbeddedRedis

    _name = f"fp8scope-tests-{secrets.token_hex(8)}"
    _servers = os.environ.setdefault("FP8SCOPE_TEST_SERVERS", str(Path(tempfile.gettempdir()) / _name))
    os.environ.setdefault("DATABASE_URL", EmbeddedPostgres(Path(_servers) / "postgres").url)
    os.environ.setdefault("REDIS_URL", EmbeddedRedis(Path(_servers) / "redis").url)

# Parallel test processes share one Redis, each with a database of its own.
_worker = re.fullmatch(r"gw(\d+)", os.environ.get("PYTEST_XDIST_WORKER", ""))
if _worker:
    os.environ["REDIS_URL"] = re.sub(
        r"(?<=[?&]db=)\d+", str(1 + int(_worker[1]) % 15), os.environ["REDIS_URL"]
    )

from fp8scope_dashboard.settings.base import *  # noqa: E402,F403
from fp8scope_dashboard.settings.base import DATABASES, PACKAGE  # noqa: E402

ALLOWED_HOSTS = ["*"]
# Each test closes its own connections: a pool would keep the test database busy when it is dropped.
DATABASES["default"]["OPTIONS"] = {}
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
}
WHITENOISE_USE_FINDERS = True
# Nothing is collected for tests; WhiteNoise warns of a folder that does not exist.
STATIC_ROOT = PACKAGE / "pages" / "static"
