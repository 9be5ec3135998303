"""Tools without a dashboard: their schemas, and answers of servers that are older, newer or broken."""

from __future__ import annotations

import json
from typing import Any

import pytest
from agent.helpers.answer_server import Prepared, answer_server
from agent.helpers.stored_rows import RUN, row, verdict

pytest.importorskip("mcp", reason="the extra mcp is not installed")

from fp8scope.client import Client  # noqa: E402
from fp8scope.mcp_server import tool as tool_module  # noqa: E402
from fp8scope.mcp_server.tool import McpTool, ToolRefusalError  # noqa: E402
from fp8scope.mcp_server.tools import TOOLS  # noqa: E402
from fp8scope.mcp_server.tools.series import AS_LOGGED, unit_of  # noqa: E402

NAMED = {tool.name: tool for tool in TOOLS}
PAGE = {"runs": [row()], "total": 1, "problems": [], "next": None}


def answer_of(name: str, answers: list[Any], **arguments: Any) -> tuple[str, dict[str, Any]]:
    """The answer of a tool to answers of a server."""
    with answer_server([Prepared(body=body) for body in answers]) as server:
        return NAMED[name].answer(Client(server.url, "fp8s_secret", patience=0.0), arguments)


def test_it_works() -> None:
    sentence, content = answer_of("list_runs", [PAGE])
    assert sentence == "1 of 1 runs. 1 worse than the baseline."
    (run,) = content["runs"]
    assert (run["loss"], run["delta"], run["words"]) == ("NaN", 0.01, "worse than the baseline")
    assert content["links"][0]["url"] == "https://example.org/p/default/"


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_schemas_are_closed_described_and_small(tool: McpTool) -> None:
    described = tool.described()
    assert described.input_schema["additionalProperties"] is False
    assert described.input_schema["type"] == "object" and described.output_schema is not None
    assert {"links", "left_out"} <= described.output_schema["properties"].keys()
    text = json.dumps([described.input_schema, described.output_schema])
    assert '"title": "' not in text and len(text) < 16_000
    # A model reads the beginning of a description first.
    assert (described.description or "").endswith(".") and len(described.description or "") < 500


def test_names_are_unique_and_sorted_by_what_they_do() -> None:
    assert len(NAMED) == len(TOOLS)
    assert [tool.name for tool in TOOLS if tool.access is not tool_module.Access.READS] == [
        "write_note",
        "give_command",
    ]


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("saturation_rate", "share of the elements, 0 to 1"),
        ("learning_rate", AS_LOGGED),
        ("loss", AS_LOGGED),
        ("time_forward", "s"),
        ("anatomy/data_seconds", "s"),
        ("memory_peak", "bytes"),
        ("gpu_power_watts", "W"),
        ("model_flops_per_second", "1/s"),
    ],
)
def test_units_are_those_of_the_names(name: str, unit: str) -> None:
    assert unit_of(name) == unit


def test_a_verdict_of_a_newer_server_is_read() -> None:
    newer = row(verdict=verdict(verdict="undecidable", unit="bits"), extra=1)
    sentence, content = answer_of("list_runs", [{**PAGE, "runs": [newer], "more": 2}])
    assert content["runs"][0]["verdict"] == "undecidable" and "1 no verdict." in sentence


@pytest.mark.parametrize(
    "body", [{**PAGE, "runs": [row(last_step="x")]}, {**PAGE, "runs": [{"id": RUN}]}], ids=["type", "missing"]
)
def test_an_answer_of_another_form_is_a_refusal(body: Any) -> None:
    with pytest.raises(ToolRefusalError, match="one version of fp8scope on both|older than this client"):
        answer_of("list_runs", [body])


def test_an_answer_that_is_too_large_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_module, "MAX_ANSWER_BYTES", 100)
    with pytest.raises(ToolRefusalError, match="a smaller limit"):
        answer_of("list_runs", [PAGE])


def test_arguments_are_never_repeated_in_an_error() -> None:
    with pytest.raises(ToolRefusalError) as refused:
        answer_of("list_runs", [PAGE], limit="secret" * 1_000, **{"\x1b[1m": 1})
    assert "secret" not in str(refused.value) and "\x1b" not in str(refused.value)


def test_a_server_that_is_away_is_a_refusal() -> None:
    client = Client("http://127.0.0.1:9", "fp8s_secret", patience=0.0)
    with pytest.raises(ToolRefusalError, match="does not answer") as refused:
        NAMED["list_runs"].answer(client, {})
    assert "fp8s_secret" not in str(refused.value)
