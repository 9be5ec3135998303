"""Convert server URLs into the forms that Django and Celery expect."""

from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured
from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

ENCODE = "Percent-encode the characters : / ? # @ % in the user and the password."


def database_from_url(url: str, variable: str = "DATABASE_URL") -> dict[str, Any]:
    """Return the DATABASES entry, without OPTIONS, for a libpq URL. `variable` is its name in errors.

    Any libpq URL works, including Unix sockets (`postgresql://user@/name?host=/run/pg`).

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
