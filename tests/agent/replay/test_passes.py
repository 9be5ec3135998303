"""Two passes of a step are the same step if loss and gradient are the same."""

import pytest
import torch
from torch import Tensor

from fp8scope.replay.passes import Pass, same_gradient
from fp8scope.replay.verdict import ReplayResult

ONES = torch.ones(64)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (ONES, True),
        (ONES * (1 + 1e-6), True),
        (ONES * 1.005, True),
        (ONES * 1.02, False),
        (-ONES, False),
        (ONES * torch.nan, False),
        (ONES * 0, False),
    ],
)
def test_it_works(other: Tensor, same: bool) -> None:
    assert same_gradient(Pass((), [ONES]), Pass((), [other])) is same


def test_gradients_that_are_not_finite() -> None:
    bad = ONES.clone()
    bad[3] = torch.nan
    assert same_gradient(Pass((), [bad]), Pass((), [bad.clone()]))
    assert not same_gradient(Pass((), [bad]), Pass((), [bad.roll(1)]))
    assert same_gradient(Pass((), []), Pass((), []))
    assert not same_gradient(Pass((), []), Pass((), [ONES]))
    assert same_gradient(Pass((), [ONES * 0]), Pass((), [ONES * 0]))


def test_a_finding_says_what_differs() -> None:
    def said(replayed: float, repeated: float) -> str:
        finding = ReplayResult(
            step=37, recorded=replayed, replayed=replayed, repeatable=False, repeated=repeated
        )
        assert finding.diverges is None and finding.product is None
        return " ".join(finding.sentences())

    assert "loss 2.5, then 1.5" in said(2.5, 1.5)
    assert "the gradient differs" in said(2.5, 2.5)
    assert "not repeatable" not in " ".join(
        ReplayResult(step=37, recorded=2.5, replayed=2.5, repeatable=True).sentences()
    )
