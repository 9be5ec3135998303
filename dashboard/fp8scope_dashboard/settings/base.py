"""Django settings, read from environment variables.

FP8SCOPE_BASE_URL controls security: with `https://` or unset, secure cookies, redirects and HSTS are on; with
`http://`, as `fp8scope up` sets it for a loopback address, they are off, because browsers would refuse them.
"""

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from django.core.exceptions import ImproperlyConfigured
from django.core.management.utils import get_random_secret_key
from kombu.entity import Queue
from whitenoise.compress import Compressor  # type: ignore[import-untyped]

from fp8scope_dashboard.settings.cold_store import cold_store_from_environment
from fp8scope_dashboard.settings.database import REPLICA_SILENCE, broker_from_url, database_from_url
from fp8scope_dashboard.settings.days import whole_days
from fp8scope_dashboard.settings.log_level import log_format_from_text, log_level_from_text
from fp8scope_dashboard.settings.networks import networks_from_environment
from fp8scope_dashboard.settings.secret_files import secret_from_environment
from fp8scope_dashboard.settings.sign_in import (
    oidc_from_environment,
    passwords_from_environment,
    two_factors_from_environment,
)

PACKAGE = Path(__file__).resolve().parent.parent
DATA_DIR = Path(os.environ.get("FP8SCOPE_DATA_DIR", "~/.fp8scope")).expanduser()

BASE_URL = os.environ.get("FP8SCOPE_BASE_URL", "https://localhost").rstrip("/")
_base = urlsplit(BASE_URL)
if _base.scheme not in ("http", "https") or not _base.hostname:
    raise ImproperlyConfigured(f"FP8SCOPE_BASE_URL must look like https://host[:port], not {BASE_URL!r}")
SECURE = _base.scheme == "https"

# A random key lets management commands run without configuration. asgi.py refuses to serve with it, because
# sessions would not survive a restart or be shared between web processes.
SECRET_KEY = secret_from_environment("FP8SCOPE_SECRET_KEY")
SECRET_KEY_IS_RANDOM = not SECRET_KEY
if SECRET_KEY_IS_RANDOM:
    SECRET_KEY = get_random_secret_key()
# Former keys, newest first: they verify and decrypt what was made with them.
SECRET_KEY_FALLBACKS = list(filter(None, secret_from_environment("FP8SCOPE_SECRET_KEY_FALLBACKS").split(",")))

DEBUG = False
ALLOWED_HOSTS = [_base.hostname, *filter(None, os.environ.get("FP8SCOPE_ALLOWED_HOSTS", "").split(","))]
CSRF_TRUSTED_ORIGINS = [BASE_URL]

# Reverse proxies whose X-Forwarded-For header is trusted: comma-separated addresses or networks.
TRUSTED_PROXIES = networks_from_environment("FP8SCOPE_TRUSTED_PROXIES")

# Private addresses that alert channels may connect to, and the mail server for those without one.
CHANNEL_NETWORKS = networks_from_environment("FP8SCOPE_CHANNEL_NETWORKS")
SMTP_URL = secret_from_environment("FP8SCOPE_SMTP_URL")
MAIL_FROM = os.environ.get("FP8SCOPE_MAIL_FROM", "")
# With this token, monitoring reads /server/status.json. Empty: only administrators do.
STATUS_TOKEN = secret_from_environment("FP8SCOPE_STATUS_TOKEN")

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_htmx",
    "ninja",
    "fp8scope_dashboard",
    "fp8scope_dashboard.accounts",
    "fp8scope_dashboard.audit",
    "fp8scope_dashboard.runs",
    "fp8scope_dashboard.receipts",
    "fp8scope_dashboard.media",
    "fp8scope_dashboard.telemetry",
    "fp8scope_dashboard.evaluations",
    "fp8scope_dashboard.ingest",
    "fp8scope_dashboard.analysis",
    "fp8scope_dashboard.diagnosis",
    "fp8scope_dashboard.alerts",
    "fp8scope_dashboard.control",
    "fp8scope_dashboard.shared_reports",
    "fp8scope_dashboard.file_imports",
    "fp8scope_dashboard.mlflow_tracking",
    "fp8scope_dashboard.otlp_metrics",
    "fp8scope_dashboard.distribution",
    "fp8scope_dashboard.sql_views",
    "fp8scope_dashboard.pages",
]

MIDDLEWARE = [
    "fp8scope_dashboard.edge.callers.remember_sessions",
    "fp8scope_dashboard.api.middleware.ApiErrors",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "fp8scope_dashboard.accounts.time_zones.UseTimeZone",
    "django.contrib.messages.middleware.MessageMiddleware",
    "fp8scope_dashboard.accounts.second_factor.required.RequireSecondFactor",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "fp8scope_dashboard.pages.middleware.content_security_policy",
    "fp8scope_dashboard.pages.middleware.PlotlyAnnounced",
    "fp8scope_dashboard.pages.cold_values.ColdValuesExplained",
    "fp8scope_dashboard.pages.middleware.FiguresFromReplica",
]

ROOT_URLCONF = "fp8scope_dashboard.urls"
ASGI_APPLICATION = "fp8scope_dashboard.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "fp8scope_dashboard.pages.storage_notice.storage_notice",
                "fp8scope_dashboard.pages.undo_offer.undo_offer",
            ],
        },
    },
]

# PostgreSQL only. A pool, not persistent connections: there are more threads than connections.
DATABASE_URL = secret_from_environment("DATABASE_URL", "postgresql://localhost/fp8scope")
DATABASES: dict[str, Any] = {"default": {**database_from_url(DATABASE_URL), "CONN_HEALTH_CHECKS": True}}
_POOL = {
    "min_size": 1,
    "max_size": int(os.environ.get("FP8SCOPE_DB_POOL", "16")),
    # A request waits this long for a connection, then gets status 503.
    "timeout": 5,
    # The pause between attempts doubles up to this, then starts over, so that a recovered PostgreSQL is
    # noticed within seconds.
    "reconnect_timeout": 4,
}
DATABASES["default"]["OPTIONS"]["pool"] = _POOL
# The longest query of a page, see db/statement_limit.py; 0: no limit.
STATEMENT_SECONDS = int(os.environ.get("FP8SCOPE_STATEMENT_SECONDS") or 0)
# Statements that repeat, those of every batch above all, are parsed and planned once for each connection. A
# pooler must know of it: pgbouncer does from 1.22 on.
if os.environ.get("FP8SCOPE_PREPARED_STATEMENTS") == "1":
    DATABASES["default"]["OPTIONS"]["prepare_threshold"] = 5
# A read replica for figures; see db/replica.py. It may fail, but must fail fast.
if REPLICA_URL := secret_from_environment("FP8SCOPE_REPLICA_URL"):
    DATABASES["replica"] = {
        **database_from_url(REPLICA_URL, "FP8SCOPE_REPLICA_URL", REPLICA_SILENCE),
        "CONN_HEALTH_CHECKS": True,
        "TEST": {"MIRROR": "default"},
    }
    DATABASES["replica"]["OPTIONS"]["pool"] = {**_POOL, "min_size": 0, "timeout": 2}
    DATABASE_ROUTERS = ["fp8scope_dashboard.db.replica.Router"]
# The data directory of the embedded PostgreSQL; telemetry/disk_space.py watches its free space.
DATABASE_DIR = os.environ.get("FP8SCOPE_DATABASE_DIR", "")
# The object store of old values, see docs/cold_store.md; None without one.
COLD_STORE = cold_store_from_environment(DATA_DIR)
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

REDIS_URL = secret_from_environment("REDIS_URL", "redis://localhost:6379/0")
CACHES = {
    "default": {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": REDIS_URL,
        "KEY_PREFIX": "fp8scope",
    }
}

# The ways to sign in; see docs/accounts.md.
OIDC = oidc_from_environment()
PASSWORDS = passwords_from_environment()
TWO_FACTORS = two_factors_from_environment()

# For how many days the audit log is kept; 0: changes for ever, see audit/queries.py.
AUDIT_DAYS = whole_days("FP8SCOPE_AUDIT_DAYS")

AUTH_USER_MODEL = "accounts.User"
# The second is for sign-in links. It never checks passwords: the first backend stops failed attempts.
AUTHENTICATION_BACKENDS = [
    "fp8scope_dashboard.accounts.passwords.PasswordBackend",
    "django.contrib.auth.backends.ModelBackend",
]
# The others verify what older versions have stored; a sign-in replaces it.
PASSWORD_HASHERS = [
    "fp8scope_dashboard.accounts.hashers.Argon2",
    "django.contrib.auth.hashers.PBKDF2PasswordHasher",
    "django.contrib.auth.hashers.ScryptPasswordHasher",
]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in ("UserAttributeSimilarityValidator", "MinimumLengthValidator", "CommonPasswordValidator")
]
LOGIN_URL = "signin"
LOGIN_REDIRECT_URL = "home"
LOGOUT_REDIRECT_URL = "signin"

LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_TZ = True

STATIC_URL = "static/"
STATIC_ROOT = DATA_DIR / "static"
STATICFILES_FINDERS = [
    "django.contrib.staticfiles.finders.AppDirectoriesFinder",
    "fp8scope_dashboard.pages.finders.PlotlyFinder",
]
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "fp8scope_dashboard.settings.storage.StaticFiles"},
}
# Pages use hashed names only, and source maps are rarely requested: compress only what is served.
WHITENOISE_KEEP_ONLY_HASHED_FILES = True
WHITENOISE_SKIP_COMPRESS_EXTENSIONS = [*Compressor.SKIP_COMPRESS_EXTENSIONS, "map"]

SECURE_SSL_REDIRECT = SECURE
SECURE_HSTS_SECONDS = 31_536_000 if SECURE else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE
# The lists that browsers ship are hard to leave: only who asks for it is put on them.
SECURE_HSTS_PRELOAD = SECURE and os.environ.get("FP8SCOPE_HSTS_PRELOAD") == "1"
SILENCED_SYSTEM_CHECKS = ["security.W021"]
# The description of the API is for everybody, unless it is private.
PRIVATE_API_DOCS = os.environ.get("FP8SCOPE_PRIVATE_API_DOCS") == "1"
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if SECURE else None
SESSION_COOKIE_SECURE = SECURE
CSRF_COOKIE_SECURE = SECURE
SECURE_REFERRER_POLICY = "same-origin"
# Isolate windows that a page opens.
SECURE_CROSS_ORIGIN_OPENER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"

# Ingest has its own limits (wire/limits.py); this is for everything else.
DATA_UPLOAD_MAX_MEMORY_SIZE = 32 * 1024 * 1024

CELERY_BROKER_URL = broker_from_url(REDIS_URL)
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_TIME_LIMIT = 600
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
# What an alert waits for has its own queues: `fp8scope up` has a worker that takes nothing else, so that no
# long job holds up an alert. A worker of all queues takes these two first.
CELERY_TASK_QUEUES = [
    Queue(name)  # type: ignore[no-untyped-call]
    for name in ("deliveries", "evaluations", "celery")
]
CELERY_TASK_DEFAULT_QUEUE = "celery"
CELERY_TASK_ROUTES = {
    "fp8scope_dashboard.alerts.tasks.deliver": {"queue": "deliveries"},
    **{
        f"fp8scope_dashboard.{task}": {"queue": "evaluations"}
        for task in (
            "alerts.tasks.evaluate_waiting",
            "alerts.tasks.sweep",
            "alerts.tasks.deliver_due",
            "alerts.tasks.follow_up",
            "runs.tasks.mark_silent",
        )
    },
}
CELERY_TIMEZONE = "UTC"
CELERY_BEAT_SCHEDULER = "fp8scope_dashboard.servers.scheduler.Scheduler"
# Fail at once if Redis is down; a sweep finds the work later.
CELERY_TASK_PUBLISH_RETRY = False
CELERY_BROKER_TRANSPORT_OPTIONS = {
    "socket_connect_timeout": 1.0,
    "socket_timeout": 5.0,
    "visibility_timeout": 700,
    # In the order of CELERY_TASK_QUEUES, instead of each queue in turn.
    "queue_order_strategy": "priority",
}
# Seconds between the runs of each periodic task.
_PERIODIC_TASKS = {
    "alerts.tasks.sweep": 10.0,
    "alerts.tasks.deliver_due": 10.0,
    "alerts.tasks.follow_up": 15.0,
    "analysis.tasks.sweep": 15.0,
    "diagnosis.tasks.sweep": 20.0,
    "runs.tasks.mark_silent": 30.0,
    "telemetry.tasks.sweep_compaction": 30.0,
    "telemetry.tasks.sweep_deletions": 60.0,
    "telemetry.tasks.sweep_retention": 3600.0,
    "telemetry.tasks.sweep_cold_store": 900.0,
    "sql_views.tasks.enforce_limits": 15.0,
    # It looks at every run.
    "sql_views.tasks.copy_histories": 60.0,
    "file_imports.tasks.sweep": 15.0,
    "audit.tasks.delete_old": 3600.0,
    "accounts.tasks.delete_expired_sessions": 3600.0,
}
CELERY_BEAT_SCHEDULE: dict[str, dict[str, Any]] = {
    task: {"task": f"fp8scope_dashboard.{task}", "schedule": seconds}
    for task, seconds in _PERIODIC_TASKS.items()
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s%(context)s"},
        "json": {"()": "fp8scope_dashboard.instrumentation.log_context.JsonLines"},
    },
    "filters": {
        "refusals": {"()": "fp8scope_dashboard.settings.refusals.RefusalsInOneLine"},
        "redact": {"()": "fp8scope_dashboard.settings.redaction.RedactSecrets"},
        "context": {"()": "fp8scope_dashboard.instrumentation.log_context.AddContext"},
    },
    "handlers": {
        "console": {
            "class": "logging.StreamHandler",
            "formatter": log_format_from_text(os.environ.get("FP8SCOPE_LOG_FORMAT", "")),
            "filters": ["refusals", "redact", "context"],
        },
    },
    # At level DEBUG urllib3 logs request paths, and that of a webhook is secret. Apprise quotes what
    # receivers answer; what is useful of it is stored with the delivery.
    "loggers": {"urllib3": {"level": "INFO"}, "apprise": {"level": "CRITICAL"}},
    "root": {
        "handlers": ["console"],
        "level": log_level_from_text(os.environ.get("FP8SCOPE_LOG_LEVEL", "")),
    },
}
