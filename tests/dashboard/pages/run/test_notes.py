"""The tab of notes: who may write, what is shown, and what happens when two people write."""

from __future__ import annotations

from dashboard.helpers.recording import make_run
from dashboard.helpers.visitors import Visitor

from fp8scope_dashboard.runs.models import Artefact, Note


def tab(visitor: Visitor, run_id: object) -> str:
    return visitor.client.get(visitor.address(f"runs/{run_id}/?tab=notes")).content.decode()


def test_it_works(member: Visitor, viewer: Visitor) -> None:
    run = make_run(member.project, "r")
    sent = {"text": "# Seen\n\n**Frozen** <script>x</script>", "version": "0"}
    answer = member.client.post(member.address(f"runs/{run.id}/note"), sent)
    assert answer.status_code == 302 and answer["Location"].endswith("?tab=notes")
    page = tab(viewer, run.id)
    assert "<h3>Seen</h3>" in page and "<strong>Frozen</strong>" in page and "mia" in page
    assert "<script>x" not in page
    # A viewer has no form.
    assert "note-text" not in page and "note-text" in tab(member, run.id)


def test_a_text_that_is_refused_is_not_lost(member: Visitor) -> None:
    run = make_run(member.project, "r")
    Note.objects.create(run=run, text="Theirs, <i>saved</i> first.", version=1)
    answer = member.client.post(member.address(f"runs/{run.id}/note"), {"text": "My <b>text", "version": "0"})
    page = answer.content.decode()
    assert answer.status_code == 409 and "Somebody else has changed the note" in page
    assert "My &lt;b&gt;text</textarea>" in page and 'name="version" value="1"' in page
    for version in ("", "x", "-1", "1e9", "9" * 30):
        sent = {"text": "Mine.", "version": version}
        assert member.client.post(member.address(f"runs/{run.id}/note"), sent).status_code == 409
    assert Note.objects.get().text == "Theirs, <i>saved</i> first."


def test_previews(member: Visitor) -> None:
    run = make_run(member.project, "r")
    answer = member.client.post(member.address(f"runs/{run.id}/note/preview"), {"text": "*now* <img src=x>"})
    assert answer.content.decode() == "<p><em>now</em> &lt;img src=x&gt;</p>"
    assert not Note.objects.exists()


def test_links(member: Visitor, viewer: Visitor) -> None:
    run = make_run(member.project, "r")
    path = member.address(f"runs/{run.id}/artefacts")
    member.client.post(path, {"name": "Log", "address": "https://x.test/log"})
    member.client.post(path, {"name": "<b>", "address": "gs://bucket/x"})
    refused = member.client.post(path, {"name": "x", "address": "javascript:alert(1)"}, follow=True)
    assert "A link begins with" in refused.content.decode()
    page = tab(viewer, run.id)
    assert 'href="https://x.test/log" rel="noopener nofollow"' in page and "&lt;b&gt;" in page
    assert "gs://bucket/x</code>" in page and 'href="gs://' not in page and "javascript:" not in page
    other = make_run(member.project, "other")
    artefact = Artefact.objects.get(name="Log")
    # Only under the run that has it.
    gone = member.client.post(member.address(f"runs/{other.id}/artefacts/{artefact.pk}/remove"))
    assert gone.status_code == 404
    member.client.post(f"{path}/{artefact.pk}/remove")
    assert list(Artefact.objects.values_list("name", flat=True)) == ["<b>"]
