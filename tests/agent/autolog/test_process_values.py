"""Entries of a configuration that belong to one process are kept apart."""

import sys
import weakref

import pytest

from fp8scope.autolog.frame_locals import locals_of
from fp8scope.autolog.process_values import set_apart

NOW = 1_700_000_000.0


def test_it_works() -> None:
    config = {
        "lr": 1e-3, "rank": 3, "seed": 1_700_000_000, "steps": 2000, "out_dir": "out-seed-7",
        "model": {"width": 64, "local-rank": 3}, "run_name": "cartpole__1__1699999999",
    }  # fmt: skip
    assert set_apart(config, NOW) == {
        "lr": 1e-3, "seed": 1_700_000_000, "steps": 2000, "model": {"width": 64},
        "job": {
            "rank": 3, "out_dir": "out-seed-7", "model.local-rank": 3, "run_name": "cartpole__1__1699999999"
        },
    }  # fmt: skip


@pytest.mark.parametrize("value", [1_699_999_000.5, "runs/x_1700000100", "2023-11-14_22-13", "20231114T2213"])
def test_times_of_the_start_are_set_apart(value: object) -> None:
    assert set_apart({"tag": value}, NOW) == {"job": {"tag": value}}


@pytest.mark.parametrize("value", [1700, 1.7, True, None, "wikitext-103", "2023-11-14", "v1.2.3", [1]])
def test_settings_stay(value: object) -> None:
    assert set_apart({"tag": value}, NOW) == {"tag": value}


def test_an_entry_of_the_script_keeps_its_name() -> None:
    assert set_apart({"job": "a", "rank": 0}, NOW) == {"job": "a", "job_": {"rank": 0}}
    assert set_apart({"job": {"a": 1}, "pid": 5}, NOW) == {"job": {"a": 1, "pid": 5}}


def test_reading_local_variables_keeps_nothing_alive() -> None:
    """A function that deletes a variable frees it, also if its frame was read; its own `locals()` stay."""

    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)
    assert locals_of(sys._getframe())["thing"] is thing
    del thing
    assert gone() is None
    own = locals()
    assert locals_of(sys._getframe())["gone"] is gone and own["gone"] is gone
