"""Unmodified scripts of other people's trainers under `fp8scope run`."""

import pytest
from agent.helpers.launching import SCRIPTS, Launch, here
from agent.helpers.stored_run import StoredRun
from agent.helpers.wire_server import WireServer

__all__ = ["here"]


def formats_of(run: StoredRun) -> dict[str, str]:
    return {t["name"]: t["format"] for t in next(iter(run.catalogues.values())) if t["format"]}


@pytest.mark.parametrize("own", [(), ("--own-optimizer",)])
def test_it_works(own: tuple[str, ...], server: WireServer, here: Launch) -> None:
    """Transformers: the Trainer gets our callback, whether it makes the optimizer or the script does."""
    assert here("--convert", "delayed", "--name", "a llama", SCRIPTS / "hf_trainer.py", *own) == 0
    stored = server.run
    assert stored.finish["state"] == "finished" and stored.finish["errors"] == 0
    assert stored.registration["name"] == "a llama" and stored.registration["total_steps"] == 4
    assert stored.registration["config"]["model"]["hidden_size"] == 64
    assert stored.steps == [1, 2, 3, 4]
    # Random weights predict one of 256 bytes, and two passes a step do not make it twice that.
    assert stored.scalars("loss")[0] == pytest.approx(5.55, rel=0.1)
    assert stored.scalars("tokens") == [256.0 * step for step in range(1, 5)]
    assert [value is not None for value in stored.scalars("eval/loss")] == [False, True, False, True]
    assert formats_of(stored)["model.layers.0.self_attn.q_proj.weight"] == "E4M3"
    assert stored.registration["recipe"]["recipe"] == "DelayedScaling"


def test_records_a_lightning_script(server: WireServer, here: Launch) -> None:
    assert here("--convert", "current", SCRIPTS / "lightning_fit.py") == 0
    stored = server.run
    assert stored.finish["state"] == "finished" and stored.finish["errors"] == 0
    assert stored.registration["name"].startswith("lightning_fit ")
    assert stored.registration["config"]["module"] == "NextByte"
    assert stored.steps == [1, 2, 3, 4] and stored.scalars("loss") == pytest.approx(
        stored.scalars("train/loss")
    )
    assert stored.scalars("tokens") == [8.0 * 17 * step for step in range(1, 5)]
    assert [value is not None for value in stored.scalars("val_loss")] == [False, True, False, True]
    assert formats_of(stored)["body.0.weight"] == "E4M3"


def test_records_a_torchao_script(server: WireServer, here: Launch) -> None:
    assert here(SCRIPTS / "torchao_float8.py") == 0
    stored = server.run
    assert stored.finish["state"] == "finished" and stored.finish["errors"] == 0
    assert stored.steps == [1, 2, 3, 4] and None not in stored.scalars("loss")
    assert stored.registration["precision"] == "fp8" and stored.registration["recipe"]
    names = [tensor["name"] for tensor in next(iter(stored.catalogues.values()))]
    watched = [name for name in formats_of(stored) if name.startswith("1.")]
    assert {name.rpartition(".")[2] for name in watched} >= {"input", "weight", "grad_output"}
    for row in stored.rows:
        assert all(row["tensors"]["amax"][names.index(name)] > 0 for name in watched)
