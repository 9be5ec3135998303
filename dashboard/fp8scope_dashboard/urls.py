"""Every address of the dashboard: the API under /api/v1/, MLflow, OpenTelemetry, and pages elsewhere."""

from django.urls import include, path

from fp8scope_dashboard.api.root import api
from fp8scope_dashboard.pages.storage_notice import on_server_error

handler500 = on_server_error

urlpatterns = [
    path("api/v1/", api.urls),
    path("mlflow/", include("fp8scope_dashboard.mlflow_tracking.urls")),
    path("otlp/", include("fp8scope_dashboard.otlp_metrics.urls")),
    path("", include("fp8scope_dashboard.accounts.urls")),
    path("", include("fp8scope_dashboard.pages.urls")),
]
