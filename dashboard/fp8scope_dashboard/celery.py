"""The Celery application: `celery -A fp8scope_dashboard.celery:app worker|beat`."""

import importlib
import logging.config
import os
from collections.abc import Sequence
from typing import Any

from celery import Celery, Task
from celery.signals import setup_logging, task_prerun, worker_init
from django.conf import settings

from fp8scope_dashboard import process_setup
from fp8scope_dashboard.instrumentation.tracing import tracer
from fp8scope_dashboard.notifications import RUN_JOBS, job_started
from fp8scope_dashboard.preload import freeze, import_lazily_imported
from fp8scope_dashboard.process_setup import keep_freed_memory

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "fp8scope_dashboard.settings.base")
keep_freed_memory()

# Of a worker of long jobs: a tenth of the processor time of a process without it, if both want all. Verdicts
# may wait, alerts may not.
NICENESS = 10

app = Celery("fp8scope")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
# Its functions are connected to signals when it is imported, which needs settings.
importlib.import_module("fp8scope_dashboard.instrumentation.jobs")


def load_before_forking(**_: Any) -> None:
    """Import in the parent process what its children need: they share the memory, and no alert waits for it.

    Messages contain addresses, for which Django imports all views.
    """
    import_lazily_imported()
    importlib.import_module(settings.ROOT_URLCONF)
    freeze()


worker_init.connect(load_before_forking)


@worker_init.connect  # type: ignore[untyped-decorator]
def send_traces(**_: Any) -> None:
    """Send traces of jobs if a receiver is configured. The SDK begins again in each child."""
    tracer.configure("fp8scope-worker")


@worker_init.connect  # type: ignore[untyped-decorator]
def give_way(sender: Any, **_: Any) -> None:
    """Let a worker that takes no alerts give way to everything else on this machine."""
    if set(sender.app.amqp.queues.consume_from) == {settings.CELERY_TASK_DEFAULT_QUEUE}:
        process_setup.give_way(NICENESS)


@task_prerun.connect  # type: ignore[untyped-decorator]
def note_start(task: Task, args: Sequence[object], **_: Any) -> None:
    """A change of a run from now on needs another job, because this one may have read already."""
    if task.name in RUN_JOBS and args:
        job_started(task.name, str(args[0]))


@setup_logging.connect  # type: ignore[untyped-decorator]
def log_as_the_web_server_does(loglevel: int | str | None = None, **_: Any) -> None:
    """Use the logging of the web server, which redacts secrets, instead of that of Celery."""
    logging.config.dictConfig(settings.LOGGING)
    logging.captureWarnings(capture=True)
    if loglevel is not None:
        logging.getLogger().setLevel(loglevel)
