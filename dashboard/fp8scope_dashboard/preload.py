"""Imports of the Python processes of a server, before they have anything to do."""

from __future__ import annotations

import gc
import importlib
import os
from typing import Final

import django

from fp8scope_dashboard.process_setup import keep_freed_memory

LAZILY_IMPORTED: Final = ("scipy.stats", "scipy.optimize", "pyarrow.parquet")
"""Modules that functions import. Each takes some tenths of a second, which no request is to wait for."""


def import_views() -> None:
    """Set Django up and import all views and middleware, so that the first request does not wait for them.

    Does not import the application: it lists the static files when it is built, and `collect` makes them
    meanwhile. Its pages would have no styles, or fail, until the next start.
    """
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "fp8scope_dashboard.settings.base")
    keep_freed_memory()
    django.setup(set_prefix=False)
    from django.conf import settings

    for module in (settings.ROOT_URLCONF, *(path.rpartition(".")[0] for path in settings.MIDDLEWARE)):
        importlib.import_module(module)


def import_lazily_imported() -> None:
    """Import what functions import."""
    for name in LAZILY_IMPORTED:
        importlib.import_module(name)


def freeze() -> None:
    """Keep the objects that exist now out of the garbage collector, before this process forks.

    Otherwise the first collection of each child writes to, and so copies, most of the memory that they share.
    """
    gc.collect()
    gc.freeze()
