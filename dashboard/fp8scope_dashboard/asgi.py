"""The ASGI application: `fp8scope_dashboard.asgi:application`."""

import logging
import os

import django
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from fp8scope_dashboard.process_setup import keep_freed_memory

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "fp8scope_dashboard.settings.base")
keep_freed_memory()

django.setup(set_prefix=False)

# Imported here because these need Django to be set up.
from fp8scope_dashboard.api.direct_batches import DirectBatches  # noqa: E402
from fp8scope_dashboard.db.statement_limit import limit_statements  # noqa: E402
from fp8scope_dashboard.edge.admission import Admission  # noqa: E402
from fp8scope_dashboard.edge.body_limit import BodyLimit  # noqa: E402
from fp8scope_dashboard.edge.health import Health  # noqa: E402
from fp8scope_dashboard.edge.measured import Measured  # noqa: E402
from fp8scope_dashboard.edge.scraped import Scraped  # noqa: E402
from fp8scope_dashboard.edge.thread_pools import ThreadPools  # noqa: E402
from fp8scope_dashboard.edge.threaded_asgi import make_handler  # noqa: E402
from fp8scope_dashboard.instrumentation.tracing import tracer  # noqa: E402

# In the format of the log.
logging.captureWarnings(capture=True)
tracer.configure("fp8scope-web")
limit_statements(settings.STATEMENT_SECONDS)
_pools = ThreadPools()
_answering = DirectBatches(make_handler(_pools), _pools)
application = Health(Measured(Scraped(Admission(BodyLimit(_answering), _pools), _pools)))

if getattr(settings, "SECRET_KEY_IS_RANDOM", False) and "base" in os.environ["DJANGO_SETTINGS_MODULE"]:
    raise ImproperlyConfigured("Set FP8SCOPE_SECRET_KEY (50 random characters) before serving.")
