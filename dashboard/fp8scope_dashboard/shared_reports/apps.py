from django.apps import AppConfig


class SharedReportsConfig(AppConfig):
    name = "fp8scope_dashboard.shared_reports"
    label = "shared_reports"

    def ready(self) -> None:
        # Models can be imported only once all apps are loaded.
        from fp8scope_dashboard.accounts.signals import access_ended, access_restored
        from fp8scope_dashboard.shared_reports.services import end_links, restore_links

        access_ended.connect(end_links, dispatch_uid="shared_reports.end_links")
        access_restored.connect(restore_links, dispatch_uid="shared_reports.restore_links")
