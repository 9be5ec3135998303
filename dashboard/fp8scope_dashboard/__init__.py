"""The fp8scope dashboard: a Django project.

Nothing is imported here: `fp8scope up` and its children would all wait for it. runs/apps.py loads Celery.
"""
