"""The registration names a run's related runs: baseline, group and parent."""

import uuid
from typing import Any

import pytest
from agent.helpers.wire_server import WireServer

import fp8scope

PARENT = str(uuid.uuid4())


@pytest.mark.usefixtures("online")
class TestParent:
    def test_it_works(self, server: WireServer) -> None:
        fp8scope.init(name="a", parent=PARENT, baseline=PARENT).finish()
        sent = server.run.registration
        assert (sent["parent"], sent["relation"], sent["baseline"]) == (PARENT, "resumed", PARENT)

    def test_a_state_names_its_run(self, server: WireServer) -> None:
        first = fp8scope.init(name="a")
        state = first.state_dict()
        first.finish()
        fp8scope.init(name="b", parent=state, relation="reference").finish()
        sent = [run.registration for run in server.runs.values() if run.registration["name"] == "b"]
        assert [(each["parent"], each["relation"]) for each in sent] == [(first.id, "reference")]

    def test_an_unknown_parent_is_kept(self, server: WireServer) -> None:
        report = fp8scope.init(name="a", parent="wandb run x1").finish()
        assert report.complete and server.run.registration["parent"] == "wandb run x1"

    def test_without_a_parent_there_is_no_relation(self, server: WireServer) -> None:
        fp8scope.init(name="a").finish()
        assert (server.run.registration["parent"], server.run.registration["relation"]) == ("", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parent": 3}, "parent must be a run's id or its state_dict()"),
        ({"parent": {"a": 1}}, "parent is not a state"),
        ({"parent": "x" * 129}, "parent must be a text of at most 128"),
        ({"parent": PARENT, "relation": "copied"}, "relation must be one of resumed, reference"),
        ({"relation": "resumed"}, "relation needs parent"),
        ({"data_hash": 1}, "data_hash must be True or False"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(fp8scope.ConfigurationError, match=message.replace("(", r"\(").replace(")", r"\)")):
        fp8scope.init(mode="disabled", **arguments)
