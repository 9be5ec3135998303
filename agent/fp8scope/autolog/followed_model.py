"""A model whose passes and updates are followed, for steps that the script does not mark."""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fp8scope.autolog.inspection import parameters_of, token_count
from fp8scope.autolog.loss_capture import Loss
from fp8scope.observe.tensors.base import inside_backward, is_traced, local

if TYPE_CHECKING:
    from fp8scope.autolog.attachment import Attachment

PROBES = 8


class ForwardNotifier:
    """Notifies the attachment when a forward pass begins. Holds only a weak reference to it.

    In a copy of the model the hook does nothing.
    """

    def __init__(self, attachment: "Attachment | None" = None, counts_tokens: bool = False) -> None:
        self._attachment = None if attachment is None else weakref.ref(attachment)
        self._counts_tokens = counts_tokens

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Do nothing while torch.compile traces: a call out of the graph would break it.
        if is_traced() or self._attachment is None:
            return
        attachment = self._attachment()
        if attachment is not None and module.training and torch.is_grad_enabled() and not inside_backward():
            attachment.forward_begins(token_count(args, kwargs) if self._counts_tokens else 0)
            if self._counts_tokens and attachment.hasher is not None:
                attachment.hash_inputs((*args, *kwargs.values()))

    def __reduce__(self) -> tuple[type["ForwardNotifier"], tuple[()]]:
        return ForwardNotifier, ()


def _version(x: Tensor) -> int:
    """Return how often a tensor was changed in place.

    FSDP2 accumulates in the local part of a sharded gradient.
    """
    if not hasattr(x, "to_local"):
        return x._version
    with torch.no_grad():
        return x._version + local(x)._version


class FollowedModel:
    """A model that is followed, with its state since the last step."""

    def __init__(self, name: str, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.name = name
        self.by_hand = not optimizers
        """Whether the script updates the model without an optimizer."""
        self.untouched: Any = None
        """If updated by hand: `state()` right after the last backward pass; None once its step has ended."""
        self.steps = 0
        """Steps of its optimizers since the attachment's current step began."""
        self.losses: list[Loss] = []
        """Losses of the current step that its optimizers have used."""
        self.divisor = 1.0
        parameters = [parameter for optimizer in optimizers for parameter in parameters_of(optimizer)]
        parameters = parameters or list(model.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad] or parameters
        # A pass may not reach every parameter (experts, heads): probe a few, including the last.
        probed = trained[:: -max(1, len(trained) // PROBES)]
        self._probes: list[weakref.ref[Tensor]] = [weakref.ref(parameter) for parameter in probed]
        self._steady = list(range(len(probed)))
        """The probes that each backward pass of this model has reached."""
        self._model = weakref.ref(model)

    def gradients(self) -> list[tuple[int, int] | None]:
        """Identify the probed gradients; any accumulation changes the result. Reads no values."""
        gradients = [None if (p := probe()) is None else p.grad for probe in self._probes]
        return [None if gradient is None else (id(gradient), _version(gradient)) for gradient in gradients]

    def is_reached(self, before: "list[tuple[int, int] | None] | None") -> bool:
        """Return whether a backward pass has changed the probed gradients.

        `before` is `gradients()` before it.
        """
        after = self.gradients()
        if after == before:
            return False
        if before is not None:
            self._steady = [index for index in self._steady if after[index] != before[index]]
        return True

    def steady_probe(self) -> "weakref.ref[Tensor] | None":
        """Return a probed parameter that each backward pass of this model has reached; None without one."""
        return self._probes[self._steady[0]] if self._steady else None

    def model(self) -> nn.Module | None:
        """Return the model, while it lives."""
        return self._model()

    def state(self) -> Any:
        """Identify the probed gradients and the versions of the probed parameters. Reads no values."""
        parameters = [probe() for probe in self._probes]
        return self.gradients(), [None if p is None else _version(p) for p in parameters]
