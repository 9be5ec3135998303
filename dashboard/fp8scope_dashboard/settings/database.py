"""Convert server URLs into the forms that Django and Celery expect."""

from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured
from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

# What Django has settings of its own for.
NAMED = ("dbname", "user", "password", "host", "port")
# A host that vanishes sends no reset: without these, a query would wait for it for a quarter of an hour, and
# one that waits for an answer for two hours. A pool full of such connections answers nothing. The kernel's
# limits do not count the time of a long query: the other side acknowledges probes meanwhile. Unix sockets
# ignore them. Where the first of two hosts is dead, the second is reached before a request gives up waiting
# for the pool, which it does after 5 s.
SILENCE: dict[str, Any] = {
    "connect_timeout": 3,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
# Somebody waits for the chart, and the primary can answer instead.
REPLICA_SILENCE: dict[str, Any] = {
    "connect_timeout": 2,
    "keepalives_idle": 2,
    "keepalives_interval": 1,
    "keepalives_count": 2,
    "tcp_user_timeout": 3_000,
}
ENCODE = "Percent-encode the characters : / ? # @ % in the user and the password."


def database_from_url(
    url: str, variable: str = "DATABASE_URL", silence: dict[str, Any] = SILENCE
) -> dict[str, Any]:
    """Return the DATABASES entry for a libpq URL. `variable` is its name in errors.

    Any libpq URL works, including Unix sockets (`postgresql://user@/name?host=/run/pg`) and several hosts.
    Its parameters, such as `sslmode`, become OPTIONS, and replace the defaults of `silence`.

    Raises:
        ImproperlyConfigured: the URL is invalid, not for PostgreSQL, or names no database.
    """
    if not url.startswith(("postgresql://", "postgres://")):
        raise ImproperlyConfigured(
            f"{variable} must begin with postgresql://. fp8scope supports only PostgreSQL."
        )
    try:
        parts = conninfo_to_dict(url)
    except ProgrammingError:
        # The message of libpq quotes the URL, which may contain a password.
        raise ImproperlyConfigured(f"{variable} is not a valid PostgreSQL URL. {ENCODE}") from None
    name = parts.get("dbname")
    if not name:
        raise ImproperlyConfigured(f"{variable} names no database: postgresql://user:password@host/NAME")
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": str(name),
        "USER": str(parts.get("user") or ""),
        "PASSWORD": str(parts.get("password") or ""),
        "HOST": str(parts.get("host") or ""),
        "PORT": str(parts.get("port") or ""),
        "OPTIONS": silence | {key: value for key, value in parts.items() if key not in NAMED},
    }


def broker_from_url(url: str) -> str:
    """Convert a redis-py URL for Celery: `unix:///path?db=N` to `redis+socket:///path?virtual_host=N`.

    Other schemes (`redis://`, `rediss://`) are the same for both.

    Raises:
        ImproperlyConfigured: the URL is invalid.
    """
    try:
        parts = urlsplit(url)
        # The message of Python quotes the port, which may be the beginning of a password.
        _ = parts.port
    except ValueError:
        raise ImproperlyConfigured(f"REDIS_URL is not a valid URL. {ENCODE}") from None
    if parts.scheme != "unix":
        return url
    database = parse_qs(parts.query).get("db", ["0"])[0]
    login = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
    return f"redis+socket://{login}{quote(unquote(parts.path))}?virtual_host={database}"
