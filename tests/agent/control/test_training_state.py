"""What is kept of a training can be taken back, and shares no memory with it."""

import torch
from agent.helpers.reference_training import Training, equal

from fp8scope.control.training_state import TrainingState, clone_batch


def test_it_works() -> None:
    training = Training()
    for batch in training.batches(3):
        training.step(batch)
    kept = TrainingState(training.model, [training.optimizer], [training.scheduler])
    expected = None
    for _ in range(2):
        for batch in training.batches(3):
            training.step(batch)
        kept.restore()
        state = training.state()
        assert expected is None or equal(state, expected)
        expected = state
    assert kept.nbytes > 0


def test_a_batch_has_memory_of_its_own() -> None:
    from collections import namedtuple

    Pair = namedtuple("Pair", "x y")
    x = torch.zeros(2, requires_grad=True)
    batch = {"a": [x, (1, "text")], "b": Pair(torch.ones(2), None)}
    copied = clone_batch(batch)
    with torch.no_grad():
        x.fill_(7)
    assert copied["a"][0].tolist() == [0, 0] and copied["a"][0].requires_grad
    assert copied["a"][1] == (1, "text") and isinstance(copied["b"], Pair) and copied["b"].y is None
