"""The addresses below /mlflow/, which is what MLFLOW_TRACKING_URI ends with."""

from django.urls import path

from fp8scope_dashboard.mlflow_tracking import views

urlpatterns = [
    path("api/2.0/mlflow/<path:path>", views.endpoint),
    # The prefix of programs that were written against the requests of MLflow's pages.
    path("ajax-api/2.0/mlflow/<path:path>", views.endpoint),
    path("", views.home),
    path("version", views.version),
    path("health", views.health),
    path("<path:path>", views.no_endpoint),
]
