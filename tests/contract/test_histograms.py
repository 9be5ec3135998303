"""Histograms of exponents over HTTP are stored once and merged over ranks; bad ones are refused."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pytest
from contract.helpers.histograms import counts, message, send
from contract.helpers.wire_client import WireClient
from helpers.live_servers import Server

from fp8scope_dashboard.receipts.models import Receipt
from fp8scope_dashboard.runs.models import Run, Tensor, Writer
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.histograms import EXPONENT_BINS, MAX_EXPONENT, MIN_EXPONENT
from fp8scope_dashboard.telemetry.models import Histogram
from fp8scope_dashboard.wire import limits


@pytest.fixture
def client(server: Server) -> WireClient:
    client = WireClient(server.url, server.token)
    assert client.register().status == 201
    assert client.catalogue(["a", "b", "c"]).status == 200
    return client


def test_it_works(client: WireClient) -> None:
    first = message(client, 0, 1, {0: counts(e0=5, zero=2), 2: counts(em3=7, bad=1)})
    answer = send(client, first)
    assert (answer.status, answer.json["status"], answer.json["rows"]) == (201, "stored", 0)
    assert send(client, message(client, 1, 101, {0: counts(e1=6)})).status == 201

    histogram = queries.histogram(client.run, 0)
    assert histogram is not None and (
        histogram.step,
        histogram.zeros,
        histogram.nonfinite,
        histogram.total,
    ) == (101, 0, 0, 6)
    assert (
        histogram.counts[1 - MIN_EXPONENT] == 6 and len(histogram.counts) == MAX_EXPONENT - MIN_EXPONENT + 1
    )
    for step in (1, 50, 100):
        histogram = queries.histogram(client.run, 0, step)
        assert histogram is not None and (
            histogram.step,
            histogram.zeros,
            histogram.counts[-MIN_EXPONENT],
        ) == (1, 2, 5)
    histogram = queries.histogram(client.run, 2)
    assert histogram is not None and (
        histogram.step,
        histogram.counts[-3 - MIN_EXPONENT],
        histogram.nonfinite,
    ) == (1, 7, 1)
    assert queries.histogram(client.run, 1) is None and queries.histogram(client.run, 0, 0) is None
    assert Run.objects.get().rows_stored == 0


def test_a_message_is_stored_once(client: WireClient) -> None:
    body = message(client, 0, 1, {0: counts(e0=5)})
    answers = [send(client, body) for _ in range(3)]
    assert [(answer.status, answer.json["status"]) for answer in answers] == [
        (201, "stored"),
        (200, "duplicate"),
        (200, "duplicate"),
    ]
    assert Histogram.objects.count() == Receipt.objects.count() == 1
    other = send(client, message(client, 0, 1, {0: counts(e0=6)}))
    assert (other.status, other.code) == (409, "writer_conflict")
    # Nor can a batch reuse the number of a histogram.
    assert client.send(client.batch(0, [1], scalars={"loss": [1.0]})).code == "writer_conflict"
    histogram = queries.histogram(client.run, 0)
    assert histogram is not None and histogram.total == 5


def test_histograms_and_batches_share_one_sequence(client: WireClient) -> None:
    assert client.send(client.batch(0, [1], scalars={"loss": [1.0]})).status == 201
    assert send(client, message(client, 1, 1, {0: counts(e0=5)})).status == 201
    assert client.send(client.batch(2, [2], scalars={"loss": [1.0]})).status == 201
    assert queries.contiguous_until(client.run, client.writer) == 3


def test_ranks_add_up(client: WireClient, server: Server) -> None:
    """Each rank numbers the tensors in its own order; the sum does not wait for missing ranks."""
    other = WireClient(server.url, server.token, run=client.run)
    assert other.catalogue(["c", "a"], rank=1).status == 200
    assert send(client, message(client, 0, 7, {0: counts(e0=5, zero=1)})).status == 201
    histogram = queries.histogram(client.run, 0)
    assert histogram is not None and histogram.total == 6
    assert send(other, message(other, 0, 7, {1: counts(e0=3, e5=2, bad=4), 0: counts(e9=1)})).status == 201
    histogram = queries.histogram(client.run, 0)
    assert histogram is not None and (histogram.total, histogram.zeros, histogram.nonfinite) == (15, 1, 4)
    assert histogram.counts[-MIN_EXPONENT] == 8 and histogram.counts[5 - MIN_EXPONENT] == 2
    histogram = queries.histogram(client.run, 2)
    assert histogram is not None and histogram.total == 1


def test_a_later_attempt_replaces_the_steps_it_writes_again(client: WireClient, server: Server) -> None:
    for seq, step in enumerate((1, 101, 201)):
        assert send(client, message(client, seq, step, {0: counts(e0=5)})).status == 201
    again = WireClient(server.url, server.token, run=client.run)
    assert again.catalogue(["a"], attempt=1).status == 200
    assert again.send(again.batch(0, [101], scalars={"loss": [1.0]})).status == 201
    histogram = queries.histogram(client.run, 0)
    assert histogram is not None and (histogram.step, histogram.total) == (1, 5)
    assert send(again, message(again, 1, 101, {0: counts(e0=9)})).status == 201
    histogram = queries.histogram(client.run, 0)
    assert histogram is not None and (histogram.step, histogram.total) == (101, 9)


def test_another_process_of_the_same_rank_does_not_count_twice(client: WireClient, server: Server) -> None:
    twin = WireClient(server.url, server.token, run=client.run)
    assert twin.catalogue(["a"]).status == 200
    for writer in (client, twin):
        assert send(writer, message(writer, 0, 7, {0: counts(e0=5)})).status == 201
    histogram = queries.histogram(client.run, 0)
    assert histogram is not None and histogram.total == 5


def test_deleting_a_run_deletes_its_histograms(client: WireClient) -> None:
    assert send(client, message(client, 0, 1, {0: counts(e0=5)})).status == 201
    Run.objects.get().delete()
    assert not Histogram.objects.exists()


def nested(values: Sequence[Any], size: int = EXPONENT_BINS, type: Any = None) -> Any:
    return pa.array(values, pa.list_(type or pa.float64(), size))


GOOD = counts(e0=1)
BAD: dict[str, tuple[Callable[[WireClient], bytes], int, str]] = {
    "no rows": (lambda c: message(c, 0, 1, {}), 422, "invalid"),
    "two steps": (
        lambda c: message(c, 0, 1, {0: GOOD, 1: GOOD}, {"step": pa.array([1, 2], pa.int64())}),
        422,
        "invalid",
    ),
    "a negative step": (lambda c: message(c, 0, -1, {0: GOOD}), 422, "invalid"),
    "a tensor twice": (
        lambda c: message(c, 0, 1, {0: GOOD, 1: GOOD}, {"tensor": pa.array([1, 1], pa.int32())}),
        422,
        "invalid",
    ),
    "a negative tensor": (lambda c: message(c, 0, 1, {-1: GOOD}), 422, "invalid"),
    "an unknown tensor": (lambda c: message(c, 0, 1, {3: GOOD}), 409, "catalogue_gap"),
    "a negative count": (lambda c: message(c, 0, 1, {0: counts(e0=-1)}), 422, "invalid"),
    "a count that is NaN": (lambda c: message(c, 0, 1, {0: counts(e0=float("nan"))}), 422, "invalid"),
    "an infinite count": (lambda c: message(c, 0, 1, {0: counts(e0=float("inf"))}), 422, "invalid"),
    "a null count": (
        lambda c: message(c, 0, 1, {0: GOOD}, {"counts": nested([[None, *GOOD[1:]]])}),
        422,
        "invalid",
    ),
    "a null list": (lambda c: message(c, 0, 1, {0: GOOD}, {"counts": nested([None])}), 422, "invalid"),
    "too few bins": (lambda c: message(c, 0, 1, {0: GOOD}, {"counts": nested([[1.0]], 1)}), 422, "invalid"),
    "float32": (
        lambda c: message(c, 0, 1, {0: GOOD}, {"counts": nested([GOOD], type=pa.float32())}),
        422,
        "invalid",
    ),
    "another column": (lambda c: message(c, 0, 1, {0: GOOD}, {"scalar:x": pa.array([1.0])}), 422, "invalid"),
    "a time in 1969": (
        lambda c: message(c, 0, 1, {0: GOOD}, {"time": pa.array([-1], pa.timestamp("us", tz="UTC"))}),
        422,
        "invalid",
    ),
    "a batch": (lambda c: c.batch(0, [1], scalars={"loss": [1.0]}), 422, "invalid"),
    "another run": (
        lambda c: message(c, 0, 1, {0: GOOD}, metadata={"fp8scope.run": str(uuid.uuid4())}),
        422,
        "invalid",
    ),
    "another protocol": (
        lambda c: message(c, 0, 1, {0: GOOD}, metadata={"fp8scope.protocol": "9"}),
        400,
        "protocol_mismatch",
    ),
    "no seq": (lambda c: message(c, 0, 1, {0: GOOD}, metadata={"fp8scope.seq": ""}), 400, "malformed"),
    "a truncated stream": (lambda c: message(c, 0, 1, {0: GOOD})[:-20], 400, "malformed"),
    "nonsense": (lambda c: b"nonsense", 400, "not_arrow"),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses_bad_input(client: WireClient, case: str) -> None:
    make, status, code = BAD[case]
    answer = send(client, make(client))
    assert (answer.status, answer.code) == (status, code), answer.body
    assert not Histogram.objects.exists() and not Receipt.objects.exists()
    assert send(client, message(client, 0, 1, {0: GOOD})).status == 201


def test_refuses_json(client: WireClient) -> None:
    assert send(client, b"{}", "application/json").code == "not_arrow"


def test_refuses_more_tensors_than_a_run_may_have(client: WireClient) -> None:
    many = {tensor: [0.0] * EXPONENT_BINS for tensor in range(limits.TENSORS + 1)}
    answer = send(client, message(client, 0, 1, many))
    assert (answer.status, answer.code) == (413, "too_large")


def test_stores_all_tensors_of_a_run_in_one_message(client: WireClient) -> None:
    names = [f"blocks.{i}.input" for i in range(2000)]
    assert client.catalogue(names, offset=3).status == 200
    everything = {3 + i: counts(e0=i + 1) for i in range(2000)}
    assert send(client, message(client, 0, 5, everything, record_batches=3)).status == 201
    index = Tensor.objects.get(name="blocks.1234.input").index
    histogram = queries.histogram(client.run, index)
    assert histogram is not None and histogram.total == 1235
    assert len(Writer.objects.get().catalogue) == 2003


def test_the_bins_are_those_of_the_kernels() -> None:
    import fp8scope_kernels

    assert fp8scope_kernels.EXPONENT_BINS == EXPONENT_BINS
    assert (fp8scope_kernels.MIN_EXPONENT, fp8scope_kernels.MAX_EXPONENT) == (MIN_EXPONENT, MAX_EXPONENT)
