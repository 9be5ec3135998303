"""Every address of the dashboard: the API for agents under /api/v1/, pages for people elsewhere."""

from django.urls import include, path

from fp8scope_dashboard.api import api

urlpatterns = [
    path("api/v1/", api.urls),
    path("", include("fp8scope_dashboard.accounts.urls")),
    path("", include("fp8scope_dashboard.pages.urls")),
]
