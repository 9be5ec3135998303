from django.apps import AppConfig


class PagesConfig(AppConfig):
    name = "fp8scope_dashboard.pages"
    label = "pages"
