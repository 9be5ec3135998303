"""The addresses below /otlp/, which is what OTEL_EXPORTER_OTLP_ENDPOINT ends with."""

from django.urls import path

from fp8scope_dashboard.otlp_metrics import views

urlpatterns = [
    path("v1/metrics", views.export_metrics),
    path("<path:path>", views.no_endpoint),
]
