"""The card of ranks and attempts: states of ranks, lag, lost ranks, and scales that disagree."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.visitors import Visitor
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts.detectors.rank_scales import spread_of
from fp8scope_dashboard.pages.run.ranks import FAILED, FINISHED, LAGGING, LOST, RANKS_SHOWN, WRITING, ranks_of
from fp8scope_dashboard.runs import services
from fp8scope_dashboard.runs.models import Run, RunState, Writer

pytestmark = pytest.mark.django_db
TENSORS = ("0.weight", "0.input")


@pytest.fixture
def run(project: Project) -> Run:
    return make_run(project, "several ranks")


def write(
    run: Run, rank: int, last: int, *, attempt: int = 0, first: int = 1, scale: float = 2.0
) -> Recorder:
    """Record the steps of a rank. The scale of its weight is `scale`; that of its input differs per rank."""
    writer = Recorder(run=run, rank=rank, tensors=TENSORS)
    Writer.objects.filter(uuid=writer.uuid).update(hostname=f"node{rank}", attempt=attempt)
    steps = np.arange(first, last + 1)
    scales = np.tile([scale, 1.0 + rank], (len(steps), 1))
    writer.rows(steps, {"loss": np.ones(len(steps))}, {"scale": scales, "numel": np.ones_like(scales)})
    run.refresh_from_db()
    return writer


def lose(writer: Recorder) -> None:
    Writer.objects.filter(uuid=writer.uuid).update(seen_at=timezone.now() - timedelta(minutes=5))


def test_it_works(run: Run) -> None:
    for rank in range(4):
        write(run, rank, 40)
    card = ranks_of(run)
    assert [(rank.rank, rank.hostname, rank.last_step, rank.lag) for rank in card.ranks] == [
        (rank, f"node{rank}", 40, 0) for rank in range(4)
    ]
    assert {rank.badge for rank in card.ranks} == {WRITING}
    assert card.troubled == [] and card.disagreement is None
    (attempt,) = card.attempts
    assert (attempt.number, attempt.first_step, attempt.last_step, attempt.ranks) == (1, 1, 40, 4)


def test_a_run_without_writers(run: Run) -> None:
    card = ranks_of(run)
    assert (card.ranks, card.attempts, card.count) == ([], [], 0)


def test_shows_the_states_of_ranks(run: Run) -> None:
    write(run, 0, 200)
    write(run, 1, 120)
    lose(write(run, 2, 100))
    write(run, 3, 200).finish()
    failing = services.writer_of(run, write(run, 4, 90).uuid)
    services.finish(
        run,
        failing,
        failed=True,
        error="Traceback\nOSError: no disk",
        rows_sent=0,
        points_sent=0,
        ends_run=False,
    )
    card = ranks_of(run)
    assert [rank.badge for rank in card.ranks] == [WRITING, LAGGING, LOST, FINISHED, FAILED]
    assert [rank.rank for rank in card.troubled] == [1, 2, 4]
    assert card.ranks[4].error == "OSError: no disk" and card.ranks[1].lag == 80


def test_detects_weights_whose_scales_differ(run: Run) -> None:
    write(run, 0, 30)
    write(run, 1, 30)
    write(run, 2, 25, scale=4.0)
    disagreement = ranks_of(run).disagreement
    assert disagreement is not None
    # Compared at the last step that all ranks have. The scales of inputs may differ.
    assert (disagreement.step, disagreement.names, disagreement.compared, disagreement.weights) == (
        25,
        ["0.weight"],
        3,
        True,
    )
    assert disagreement.deviating == [2] and disagreement.factor == "2"


def test_card_and_alert_measure_the_same(run: Run) -> None:
    """What the alert takes for equal the card does, too."""
    write(run, 0, 30)
    write(run, 1, 30, scale=2.0 * 2**0.09)
    assert ranks_of(run).disagreement is None
    write(run, 2, 30, scale=2.0 * 2**0.2)
    disagreement = ranks_of(run).disagreement
    assert disagreement is not None and disagreement.deviating == [2]
    scales = np.array([[2.0], [2.0 * 2**0.09], [2.0 * 2**0.2]])
    assert spread_of(scales) == pytest.approx([0.2]) and disagreement.factor == "1.15"


def test_compares_activations_if_the_recipe_reduces_amax(run: Run) -> None:
    write(run, 0, 10)
    write(run, 1, 10)
    assert ranks_of(run).disagreement is None
    Run.objects.update(recipe={"recipe": "DelayedScaling", "reduce_amax": True})
    run.refresh_from_db()
    disagreement = ranks_of(run).disagreement
    assert disagreement is not None and (disagreement.names, disagreement.weights) == (["0.input"], False)
    # With two ranks there is no majority.
    assert disagreement.deviating == []


def test_shows_attempts_and_their_replaced_steps(run: Run) -> None:
    services.finish(
        run,
        services.writer_of(run, write(run, 0, 50).uuid),
        failed=True,
        error="killed",
        rows_sent=0,
        points_sent=0,
    )
    write(run, 0, 60, attempt=1, first=41)
    write(run, 0, 70, attempt=2, first=61)
    card = ranks_of(run)
    shown = [
        (attempt.number, attempt.first_step, attempt.last_step, attempt.replaced_from)
        for attempt in card.attempts
    ]
    assert shown == [(3, 61, 70, None), (2, 41, 60, None), (1, 1, 50, 41)]
    assert card.attempts[-1].badge == FAILED and len(card.ranks) == 1


def test_shows_the_troubled_ones_of_a_thousand_ranks(run: Run) -> None:
    writers = [
        Writer(run=run, uuid=f"00000000-0000-0000-0000-{rank:012d}", rank=rank, last_step=100)
        for rank in range(1000)
    ]
    writers[777].seen_at = timezone.now() - timedelta(hours=1)
    Writer.objects.bulk_create(writers)
    card = ranks_of(run)
    assert card.count == 1000 and len(card.ranks) == RANKS_SHOWN
    assert [rank.rank for rank in card.troubled] == [777] and 777 in {rank.rank for rank in card.ranks}


def test_a_forked_child_is_not_a_rank(run: Run) -> None:
    write(run, 0, 20)
    write(run, 0, 5)
    (only,) = ranks_of(run).ranks
    assert only.children == 1 and only.last_step == 20


def test_a_killed_child_does_not_make_a_finished_run_silent(run: Run) -> None:
    main, child = write(run, 0, 20), write(run, 0, 5)
    main.finish()
    assert child.seq and Run.objects.get().state == RunState.RUNNING
    long_ago = timezone.now() - services.SILENT_AFTER - timedelta(seconds=1)
    Run.objects.update(heartbeat_at=long_ago)
    assert services.mark_silent() == 1
    assert Run.objects.get().state == RunState.FINISHED


def test_the_page_describes_the_ranks(member: Visitor) -> None:
    run = make_run(member.project, "several ranks")
    write(run, 0, 200)
    lose(write(run, 1, 100, scale=8.0))
    page = member.client.get(member.address(f"runs/{run.id}/ranks"))
    text = page.content.decode()
    assert page.status_code == 200 and "Ranks disagree" in text and "0.weight" in text
    assert "Rank 1" in text and "was killed or has lost its connection" in text and "node1" in text
    overview = member.client.get(member.address(f"runs/{run.id}/")).content.decode()
    assert "Ranks disagree" in overview and "rank 1 not reporting" in overview
    assert "0.weight" in member.client.get(member.address(f"runs/{run.id}/?tab=ranks")).content.decode()


def test_one_sentence_says_that_no_rank_reports(admin: Visitor) -> None:
    run = make_run(admin.project, "silent")
    for rank in range(3):
        lose(write(run, rank, 40))
    page = admin.client.get(admin.address(f"runs/{run.id}/ranks")).content.decode()
    assert page.count("notice--warning") == 1 and "No rank reports" in page


def test_a_single_rank_has_no_notice_beside_the_state_of_the_run(run: Run) -> None:
    lose(write(run, 0, 40))
    card = ranks_of(run)
    assert card.troubled and not card.has_news and not card.silent_together
