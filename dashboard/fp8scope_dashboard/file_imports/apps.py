from django.apps import AppConfig


class FileImportsConfig(AppConfig):
    name = "fp8scope_dashboard.file_imports"
    label = "file_imports"
