"""The fp8scope dashboard: a Django project."""

from fp8scope_dashboard.celery import app as celery_app

__all__ = ["celery_app"]
