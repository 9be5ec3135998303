"""Hooks of ours are away for a while; those of others stay as they were."""

import torch
from agent.helpers.reference_training import begin
from torch import nn

from fp8scope.config import Settings
from fp8scope.control.suspended_hooks import without_hooks


def test_it_works(settings: Settings) -> None:
    called: list[str] = []
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda *arguments: called.append("first"))
    run = begin(settings)
    run.watch(model)
    model.register_forward_hook(lambda *arguments: called.append("last"))
    before = list(model._forward_hooks)
    with without_hooks([model]):
        assert len(model._forward_hooks) < len(before)
        model(torch.zeros(1, 2))
        model.register_forward_hook(lambda *arguments: called.append("new"))
    assert list(model._forward_hooks)[: len(before)] == before and called == ["first", "last"]
    called.clear()
    model(torch.zeros(1, 2))
    assert called == ["first", "last", "new"]
