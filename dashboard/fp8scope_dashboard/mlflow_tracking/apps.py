from django.apps import AppConfig


class MlflowTrackingConfig(AppConfig):
    name = "fp8scope_dashboard.mlflow_tracking"
    label = "mlflow_tracking"
