"""The addresses below /mlflow/, which is what MLFLOW_TRACKING_URI ends with."""

from django.urls import path

from fp8scope_dashboard.mlflow_tracking import views

urlpatterns = [
    path("api/2.0/mlflow/<path:path>", views.endpoint),
    path("version", views.version),
    path("health", views.health),
]
