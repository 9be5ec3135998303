from django.apps import AppConfig


class IngestConfig(AppConfig):
    name = "fp8scope_dashboard.ingest"
    label = "ingest"
