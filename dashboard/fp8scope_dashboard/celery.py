"""The Celery application: `celery -A fp8scope_dashboard.celery:app worker|beat`."""

import importlib
import logging.config
import os
from typing import Any

from celery import Celery
from celery.signals import setup_logging, worker_init
from django.conf import settings

from fp8scope_dashboard.process_setup import keep_freed_memory, kill_after_parent_exit

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "fp8scope_dashboard.settings.base")
keep_freed_memory()

app = Celery("fp8scope")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


def load_before_forking(**_: Any) -> None:
    """Import scipy in the parent process, so that the pool processes share its memory."""
    for name in ("scipy.stats", "scipy.optimize"):
        importlib.import_module(name)


worker_init.connect(load_before_forking)


@setup_logging.connect  # type: ignore[untyped-decorator]
def log_as_the_web_server_does(loglevel: int | str | None = None, **_: Any) -> None:
    """Use the logging of the web server, which redacts secrets, instead of that of Celery."""
    logging.config.dictConfig(settings.LOGGING)
    if loglevel is not None:
        logging.getLogger().setLevel(loglevel)


# At import, because the worker may become an orphan while it still waits for Redis.
kill_after_parent_exit()
