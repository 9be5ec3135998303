"""The traces of steps on the run's page: the files, and how to open them."""

from __future__ import annotations

from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.visitors import Visitor

from fp8scope_dashboard.pages.run.traces import traces_of
from fp8scope_dashboard.runs.models import Artefact, Writer


def test_it_works(admin: Visitor) -> None:
    run = make_run(admin.project, "traced")
    writer = Recorder(run=run).uuid
    Writer.objects.filter(uuid=writer).update(hostname="node7")
    for name, address, step in (
        ("Trace of step 200, rank 0", "file:///runs/a%20b/step-200-rank-0.json.gz", 200),
        ("Trace of step 30, rank 0", "https://store.example/step-30.json.gz", 30),
        ("Trace of step 9", "file:///runs/notes.html", 9),
        ("Checkpoint", "file:///runs/config.json", 9),
    ):
        Artefact.objects.create(run=run, name=name, address=address, step=step, writer=writer)
    assert [(trace.step, trace.path, trace.address, trace.hostname) for trace in traces_of(run)] == [
        (30, "", "https://store.example/step-30.json.gz", "node7"),
        (200, "/runs/a b/step-200-rank-0.json.gz", "", "node7"),
    ]
    page = admin.client.get(admin.address(f"runs/{run.id}/?tab=efficiency")).content.decode()
    assert "/runs/a b/step-200-rank-0.json.gz" in page and "notes.html" not in page
    assert 'href="https://ui.perfetto.dev" rel="noopener noreferrer nofollow"' in page
    assert traces_of(make_run(admin.project, "bare")) == []
