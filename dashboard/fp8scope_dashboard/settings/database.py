"""Reading the servers' addresses into the forms that Django and Celery want."""

from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured
from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

ENCODE = "Percent-encode what is special in an address (: / ? # @ %) where it stands in a user or password."


def database_from_url(url: str, variable: str = "DATABASE_URL") -> dict[str, Any]:
    """Return Django's DATABASES entry (without OPTIONS) for a libpq URL that came in `variable`.

    Anything libpq understands works, unix sockets included (`postgresql://user@/name?host=/run/pg`).

    Raises:
        ImproperlyConfigured: the address is not PostgreSQL's, or names no database.
    """
    if not url.startswith(("postgresql://", "postgres://")):
        raise ImproperlyConfigured(
            f"{variable} must begin with postgresql://; fp8scope runs on PostgreSQL only."
        )
    try:
        parts = conninfo_to_dict(url)
    except ProgrammingError:
        # The URL may hold a password, and libpq's own words quote it.
        raise ImproperlyConfigured(f"{variable} cannot be parsed as a PostgreSQL address. {ENCODE}") from None
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
    """Return Celery's form of a redis-py URL: `unix:///path?db=N` becomes `redis+socket:///path?virtual_host=N`.

    Other schemes (`redis://`, `rediss://`) mean the same to both.

    Raises:
        ImproperlyConfigured: it is no address.
    """
    try:
        parts = urlsplit(url)
        # Python's own words would quote what it takes for the port: the beginning of a password.
        _ = parts.port
    except ValueError:
        raise ImproperlyConfigured(f"REDIS_URL cannot be parsed as an address. {ENCODE}") from None
    if parts.scheme != "unix":
        return url
    database = parse_qs(parts.query).get("db", ["0"])[0]
    login = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
    return f"redis+socket://{login}{quote(unquote(parts.path))}?virtual_host={database}"
