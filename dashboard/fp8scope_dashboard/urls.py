"""Every address of the dashboard: the API for agents under /api/v1/, pages for people elsewhere."""

from django.urls import include, path

from fp8scope_dashboard.api.root import api
from fp8scope_dashboard.pages.storage_notice import on_server_error

handler500 = on_server_error

urlpatterns = [
    path("api/v1/", api.urls),
    path("", include("fp8scope_dashboard.accounts.urls")),
    path("", include("fp8scope_dashboard.pages.urls")),
]
