from django.apps import AppConfig


class ReceiptsConfig(AppConfig):
    name = "fp8scope_dashboard.receipts"
    label = "receipts"
