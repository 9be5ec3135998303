"""The Celery application: `celery -A fp8scope_dashboard.celery:app worker|beat`."""

import os

from celery import Celery

from fp8scope_dashboard.servers.memory import keep_freed_memory
from fp8scope_dashboard.servers.orphan import end_after_parent

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "fp8scope_dashboard.settings.base")
keep_freed_memory()

app = Celery("fp8scope")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()

# At import, not when the worker is ready: it may be orphaned while it still waits for a Redis that is gone.
end_after_parent()
