"""The Celery application: `celery -A fp8scope_dashboard.celery:app worker|beat`."""

import importlib
import os
from typing import Any

from celery import Celery
from celery.signals import worker_init

from fp8scope_dashboard.servers.memory import keep_freed_memory
from fp8scope_dashboard.servers.orphan import end_after_parent

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "fp8scope_dashboard.settings.base")
keep_freed_memory()

app = Celery("fp8scope")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


@worker_init.connect
def load_before_forking(**_: Any) -> None:
    """Import scipy once for all of the worker's children, which share its memory."""
    for name in ("scipy.stats", "scipy.optimize"):
        importlib.import_module(name)


# At import, not when the worker is ready: it may be orphaned while it still waits for a Redis that is gone.
end_after_parent()
