from django.apps import AppConfig


class MediaConfig(AppConfig):
    name = "fp8scope_dashboard.media"
    label = "media"
