"""The addresses of the pages."""

from django.urls import URLPattern, path
from django.urls.converters import StringConverter, register_converter

from fp8scope_dashboard.pages import progress
from fp8scope_dashboard.pages.alerts import channels, rules
from fp8scope_dashboard.pages.alerts import views as alerts
from fp8scope_dashboard.pages.certificate import views as certificates
from fp8scope_dashboard.pages.compare import views as compare
from fp8scope_dashboard.pages.fleet import views as fleet
from fp8scope_dashboard.pages.imports import views as imports
from fp8scope_dashboard.pages.live import views as events
from fp8scope_dashboard.pages.media import views as media
from fp8scope_dashboard.pages.panels import views as panels
from fp8scope_dashboard.pages.project import (
    audit,
    audit_log,
    comparison_margin,
    home,
    llms,
    server_status,
    settings,
    tokens,
)
from fp8scope_dashboard.pages.readiness import views as readiness
from fp8scope_dashboard.pages.reports import views as shared_reports
from fp8scope_dashboard.pages.run import console_views, data, diagnosis_views, notes, related_views
from fp8scope_dashboard.pages.run import views as run
from fp8scope_dashboard.pages.run.controls import views as run_controls
from fp8scope_dashboard.pages.run.figures import views as figures
from fp8scope_dashboard.pages.runs import actions, overlay, result_views
from fp8scope_dashboard.pages.runs import views as run_list
from fp8scope_dashboard.pages.scores import figures as evaluation_figures
from fp8scope_dashboard.pages.scores import views as evaluations
from fp8scope_dashboard.pages.tensors import changes
from fp8scope_dashboard.pages.tensors import views as tensors


class CompareFigure(StringConverter):
    regex = "loss|delta|tensors"


class CertificateForm(StringConverter):
    regex = "html|json"


class ChoiceField(StringConverter):
    regex = "baseline|group"


class AlertAction(StringConverter):
    regex = "acknowledge|mute|unmute|resolve|reopen|comment"


class MapForm(StringConverter):
    regex = "json|csv"


register_converter(MapForm, "map_form")
register_converter(AlertAction, "alert_action")
register_converter(CertificateForm, "certificate_form")
register_converter(ChoiceField, "choice_field")
register_converter(CompareFigure, "compare_figure")

P = "p/<slug:slug>/"
RUN = P + "runs/<uuid:run_id>/"

urlpatterns: list[URLPattern] = [
    path("", home.home, name="home"),
    path("llms.txt", llms.llms, name="llms"),
    path("projects/new", home.project_new, name="project_new"),
    path(P, run_list.project, name="project"),
    path(P + "find/suggestions.json", run_list.suggest, name="run_suggest"),
    path(P + "find/change", actions.change, name="runs_change"),
    path(P + "find/compare", actions.compare_selected, name="compare_selected"),
    path(P + "find/changes/<uuid:action_id>/undo", actions.undo, name="runs_undo"),
    path(P + "find/curves.json", overlay.runs_figure, name="runs_figure"),
    path(P + "charts/", result_views.run_charts, name="run_charts"),
    path(P + "charts/scatter.json", result_views.run_scatter, name="run_scatter"),
    path(P + "charts/parallel.json", result_views.run_parallel, name="run_parallel"),
    path(P + "find/density", actions.list_density, name="list_density"),
    path(P + "views/save", actions.view_save, name="view_save"),
    path(P + "views/<int:view_id>/delete", actions.view_delete, name="view_delete"),
    path(P + "events", events.project_events, name="project_events"),
    path(RUN, run.run, name="run"),
    path(RUN + "margin", comparison_margin.comparison_margin, name="comparison_margin"),
    path(RUN + "colour", actions.run_colour, name="run_colour"),
    path(RUN + "data/", data.run_data, name="run_data"),
    path(RUN + "data/delete", data.run_delete, name="run_delete"),
    path(RUN + "data/run.<slug:form>", data.run_export, name="run_export"),
    path(RUN + "certificate.<certificate_form:form>", certificates.certificate, name="certificate"),
    path(RUN + "diagnosis/", diagnosis_views.diagnosis, name="diagnosis"),
    path(RUN + "events", events.run_events, name="run_events"),
    path(RUN + "readiness/", readiness.readiness, name="readiness"),
    path(RUN + "readiness/exponents.json", readiness.readiness_figure, name="readiness_figure"),
    path(RUN + "tensors/map.<map_form:form>", tensors.map_figure, name="tensor_map"),
    path(RUN + "tensors/ranking", tensors.ranking, name="tensor_ranking"),
    path(RUN + "tensors/find", tensors.tensor_find, name="tensor_find"),
    path(RUN + "tensors/<int:index>/", tensors.tensor, name="tensor"),
    path(RUN + "tensors/<int:index>/picture.json", tensors.tensor_picture, name="tensor_picture"),
    path(RUN + "changes", changes.changes, name="changes"),
    path(RUN + "ranks", run.ranks, name="ranks"),
    path(RUN + "related", related_views.related_runs, name="related_runs"),
    path(RUN + "related/baseline", related_views.baseline_new, name="baseline_new"),
    path(RUN + "related/group", related_views.group_new, name="group_new"),
    path(RUN + "related/<choice_field:field>/undo", related_views.choice_undo, name="choice_undo"),
    path(RUN + "console/lines", console_views.lines, name="console_lines"),
    path(RUN + "console/rank<int:rank>.log", console_views.text, name="console_text"),
    path(RUN + "media/<int:item_id>", media.media_content, name="media_content"),
    path(RUN + "note", notes.note_save, name="note_save"),
    path(RUN + "note/preview", notes.note_preview, name="note_preview"),
    path(RUN + "note/at-step", notes.step_note, name="step_note"),
    path(RUN + "note/at-step/save", notes.step_note_save, name="step_note_save"),
    path(RUN + "note/at-step/<int:note_id>/remove", notes.step_note_remove, name="step_note_remove"),
    path(RUN + "artefacts", notes.artefact_new, name="artefact_new"),
    path(RUN + "artefacts/<int:artefact_id>/remove", notes.artefact_remove, name="artefact_remove"),
    path(RUN + "loss.svg", run_list.spark, name="spark"),
    path(RUN + "figures/<slug:name>.json", figures.figure, name="figure"),
    path(RUN + "charts/figure.json", panels.panel_figure_view, name="panel_figure"),
    path(RUN + "charts/panel", panels.panel_form, name="panel_form"),
    path(RUN + "charts/panel/save", panels.panel_save, name="panel_save"),
    path(RUN + "charts/change", panels.panels_change, name="panels_change"),
    path(RUN + "charts/views/save", panels.panel_view_save, name="panel_view_save"),
    path(RUN + "charts/views/<int:view_id>/delete", panels.panel_view_delete, name="panel_view_delete"),
    path(RUN + "charts/views/<int:view_id>/default", panels.panel_view_default, name="panel_view_default"),
    path(RUN + "commands", run_controls.commands, name="run_commands"),
    path(RUN + "commands/new", run_controls.command_new, name="command_new"),
    path(RUN + "reports", run_controls.reports, name="run_reports"),
    path(RUN + "reports/<slug:name>.json", run_controls.report_figure, name="report_figure"),
    path(P + "compare/", compare.compare, name="compare"),
    path(P + "compare/figures/<compare_figure:name>.json", compare.compare_figure, name="compare_figure"),
    path(P + "compare/find", compare.compare_find, name="compare_find"),
    path(P + "compare/configuration", compare.compare_configuration, name="compare_configuration"),
    path(P + "media/", media.media, name="media"),
    path(P + "fleet/", fleet.fleet, name="fleet"),
    path(P + "fleet/fleet.json", fleet.fleet_json, name="fleet_json"),
    path(P + "progress", progress.progress, name="progress"),
    path(P + "evaluations/", evaluations.evaluations, name="evaluations"),
    path(P + "evaluations/scores.json", evaluation_figures.scores, name="scores"),
    path(P + "evaluations/differences.json", evaluation_figures.differences, name="score_differences"),
    path(P + "imports/", imports.imports, name="imports"),
    path(P + "imports/list", imports.import_list, name="import_list"),
    path(P + "imports/new", imports.import_new, name="import_new"),
    path(P + "reports/", shared_reports.reports, name="shared_reports"),
    path(P + "reports/new", shared_reports.report_new, name="shared_report_new"),
    path(P + "reports/<uuid:report_id>/", shared_reports.report, name="shared_report"),
    path(P + "reports/<uuid:report_id>/delete", shared_reports.report_delete, name="shared_report_delete"),
    path(P + "reports/<uuid:report_id>/links", shared_reports.link_new, name="share_link_new"),
    path(
        P + "reports/<uuid:report_id>/links/<int:link_id>/revoke",
        shared_reports.link_revoke,
        name="share_link_revoke",
    ),
    path("server/", server_status.server_status, name="server_status"),
    path("server/audit/", audit_log.server_audit, name="server_audit"),
    path("server/audit/entries.<slug:form>", audit_log.server_audit_file, name="server_audit_file"),
    path("server/status.json", server_status.server_status_json, name="server_status_json"),
    path("metrics", server_status.server_metrics, name="server_metrics"),
    path("shared/<str:secret>/", shared_reports.shared, name="shared"),
    path("alert-pictures/<str:signed>.png", alerts.picture, name="alert_picture"),
    path(P + "alerts/", alerts.alerts, name="alerts"),
    path(P + "alerts/<int:alert_id>/evidence.json", alerts.evidence, name="evidence"),
    path(P + "alerts/recent.json", alerts.recent, name="alerts_recent"),
    path(P + "alerts/acknowledge", alerts.acknowledge_many, name="acknowledge_many"),
    path(P + "alerts/acknowledge/undo", alerts.acknowledge_undo, name="acknowledge_undo"),
    path(P + "alerts/<int:alert_id>/", alerts.alert, name="alert"),
    path(P + "alerts/<int:alert_id>/<alert_action:action>", alerts.change, name="alert_change"),
    path(P + "rules/", rules.rules, name="rules"),
    path(P + "rules/new", rules.rule, name="rule_new"),
    path(P + "rules/save", rules.rule_save, name="rule_create"),
    path(P + "rules/try", rules.rule_try, name="rule_try"),
    path(P + "rules/try/<int:trial_id>", rules.trial, name="rule_trial"),
    path(P + "rules/<int:rule_id>/", rules.rule, name="rule"),
    path(P + "rules/<int:rule_id>/save", rules.rule_save, name="rule_save"),
    path(P + "rules/<int:rule_id>/switch", alerts.switch_rule, name="rule_switch"),
    path(P + "rules/<int:rule_id>/remove", rules.rule_remove, name="rule_remove"),
    path(P + "channels/", channels.channels, name="channels"),
    path(P + "channels/list", channels.channel_list, name="channel_list"),
    path(P + "channels/new/<slug:kind>", channels.channel_create, name="channel_create"),
    path(P + "channels/<int:channel_id>", channels.channel_change, name="channel_change"),
    path(P + "channels/<int:channel_id>/again", channels.delivery_again, name="delivery_again"),
    path(P + "settings/", settings.settings, name="settings"),
    path(P + "settings/general", settings.general, name="project_general"),
    path(P + "settings/archive", settings.archive, name="project_archive"),
    path(P + "settings/members/new", settings.member_add, name="member_add"),
    path(P + "settings/members/<int:member_id>", settings.member_change, name="member_change"),
    path(P + "settings/audit/", audit_log.project_audit, name="project_audit"),
    path(P + "settings/audit/entries.<slug:form>", audit_log.project_audit_file, name="project_audit_file"),
    path(P + "settings/changes/<int:entry_id>/undo", audit.change_undo, name="change_undo"),
    path(P + "settings/tokens", tokens.token_list, name="token_list"),
    path(P + "settings/tokens/new", settings.token_create, name="token_create"),
    path(P + "settings/tokens/<int:token_id>/revoke", tokens.token_revoke, name="token_revoke"),
    path(P + "settings/tokens/<int:token_id>/rotate", settings.token_rotate, name="token_rotate"),
    path(P + "settings/retention", data.retention, name="retention"),
    path(P + "settings/margins", settings.margins, name="margins"),
]
