"""The fp8scope dashboard: a Django project.

Nothing is imported here, because `fp8scope up` and its children would all wait for it. apps.py loads Celery.
"""
