"""Finds the models and optimizers of an unmodified script, for `fp8scope run`.

When an optimizer is created, the modules with its parameters get hooks. The run begins when such a model, or
a part of it, is called in training mode with gradients enabled. If a supported trainer is running, its
callback from `fp8scope.integrations` is added instead. For a script that updates its model without an
optimizer, the run begins at the first backward pass.
"""

import functools
import gc
import importlib
import logging
import sys
import weakref
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fp8scope.autolog.attach import attach_by_hand, attach_run, attachment_of, follow, watch
from fp8scope.autolog.frame_locals import locals_of
from fp8scope.autolog.inspection import holds_parameters_of, parameters_of, token_count
from fp8scope.autolog.loss_capture import Loss, listen, unlisten
from fp8scope.autolog.script_config import settings_of_model
from fp8scope.guard import Guard
from fp8scope.observe.tensors.base import inside_backward, is_traced, unwrapped
from fp8scope.process.open_runs import live_runs
from fp8scope.process.patches import Patch
from fp8scope.run import Run
from fp8scope_kernels.hooks import HookHandle, register_forward_pre_hook, register_step_pre_hook_of_all

MAX_LOOKS = 3
"""Backward passes to examine while no optimizer exists. A script may differentiate other functions."""
MAX_LOSSES = 64
"""Losses that are kept until the first step of an optimizer, where no call of its model is seen."""
logger = logging.getLogger("fp8scope")


class CallHook:
    """Notifies the discovery of a training call of a module. The hook of a copied module does nothing."""

    def __init__(self, discovery: "Discovery | None" = None) -> None:
        self._discovery = discovery

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_traced() or self._discovery is None:
            return
        if module.training and torch.is_grad_enabled() and not inside_backward():
            self._discovery.called(module, args, kwargs)

    def __reduce__(self) -> tuple[type["CallHook"], tuple[()]]:
        return CallHook, ()


class Discovery:
    """Finds models and optimizers. `begin` starts the run; `convert` converts a model to FP8."""

    def __init__(
        self,
        begin: Callable[..., Run],
        convert: Callable[[nn.Module], object] | None,
        tokens_per_step: int,
        begun: Callable[[], Run | None] = lambda: None,
    ) -> None:
        """`begun`: the run that began without a training, which one that is found continues."""
        self.run: Run | None = None
        self._begun = begun
        self._begin = begin
        self._convert = convert
        self._tokens_per_step = tokens_per_step
        self._guard = Guard()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._models: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()
        """The model that each hooked module is a part of."""
        self._handles: list[tuple[weakref.ref[nn.Module], HookHandle]] = []
        """The hooks, and the models that they belong to."""
        self._step_handle: HookHandle | None = None
        self._losses: list[Loss] = []
        """Losses since there is an optimizer, until its model is found."""
        self._names: set[str] = set()
        self._ended = False
        self._patches: list[Patch] = []
        self._looked = 0

    def install(self) -> None:
        """Start looking. Call it right after torch is imported; `uninstall` undoes the patches."""
        listen(self)
        self._patches = [
            Patch(Optimizer, "__init__", self._noting_optimizer),
            Patch(torch, "compile", self._noting_compile),
        ]

    @property
    def expects_training(self) -> bool:
        """Return whether the script has an optimizer, whose first step is still to come."""
        return bool(self._optimizers)

    @property
    def has_ended(self) -> bool:
        """Return whether nothing is looked for any more, or a training was found."""
        return self._ended or self.run is not None

    def uninstall(self) -> None:
        """Stop looking and undo the patches of `install`. A run that has begun continues."""
        self._end()
        for patch in self._patches:
            patch.restore()
        self._patches.clear()

    def _noting_optimizer(self, make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def noting(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            with self._guard.shield("looking for an optimizer's model"):
                self._note(optimizer)

        return noting

    def _noting_compile(self, compile_: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compile_)
        def noting(*args: Any, **kwargs: Any) -> Any:
            compiled = compile_(*args, **kwargs)
            if isinstance(compiled, nn.Module):
                with self._guard.shield("noting a compiled model"):
                    self._note_compiled(compiled)
            return compiled

        return noting

    # Called when the script creates an optimizer, compiles a model, calls a module or steps

    def _note(self, optimizer: Optimizer) -> None:
        if self._ended or self._join_trainer():
            return
        self._optimizers.add(optimizer)
        for outermost in models_of(optimizer):
            model = unwrapped(outermost)
            # Hook each submodule as well: a script may call them and never the whole model.
            for module in (outermost, *model.modules()):
                self._await_call(module, model)
        if self._step_handle is None:
            # Not a hook of the optimizer: it iterates over these while `_first_step` registers others.
            self._step_handle = register_step_pre_hook_of_all(self._first_step)

    def _note_compiled(self, compiled: nn.Module) -> None:
        """Hook the wrapper that torch.compile returned; the model inside runs no hooks."""
        inner = getattr(compiled, "_orig_mod", None)
        if isinstance(inner, nn.Module) and not self._ended:
            self._await_call(compiled, self._models.get(inner, inner))

    def _await_call(self, module: nn.Module, model: nn.Module) -> None:
        if self._models.get(module) is None:
            handle = register_forward_pre_hook(module, CallHook(self), prepend=True, with_kwargs=True)
            self._handles.append((weakref.ref(model), handle))
        self._models[module] = model

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Called before each training call of a hooked module."""
        with self._guard.shield("looking for the model"):
            model = self._models.get(module)
            if model is not None and not self._ended:
                self._found(model, module)
                attachment = attachment_of(self.run) if self.run is not None else None
                if attachment is not None:
                    # This call began before the attachment registered its hook.
                    attachment.forward_begins(token_count(args, kwargs))

    def _first_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Begin the run at an optimizer's step if no hook saw its model: a compiled graph calls the model."""
        if self._ended or optimizer not in self._optimizers:
            return
        attachment = attachment_of(self.run) if self.run is not None else None
        if attachment is not None and optimizer in attachment.optimizers:
            return
        with self._guard.shield("looking for the model"):
            for outermost in models_of(optimizer):
                model = unwrapped(outermost)
                if self._convert is not None:
                    logger.warning("the model is already compiled: it is recorded but not converted to FP8.")
                    self._convert = None
                losses, self._losses = self._losses, []
                self._found(model, model)
                attachment = attachment_of(self.run) if self.run is not None else None
                if attachment is not None:
                    for loss in losses:
                        attachment.after_backward({}, loss)

    # A script without an optimizer, or a model whose calls are not seen

    def before_backward(self) -> Any:
        """Return the models that this backward pass may train, and their gradients."""
        if self._optimizers:
            return []
        with self._guard.shield("looking for the model"):
            self._looked += 1
            if self._looked >= MAX_LOOKS:
                unlisten(self)
            models = models_where(lambda parameter: parameter.requires_grad)
            return [(weakref.ref(model), _gradients(model)) for model in models if unwrapped(model).training]
        return []

    def failed(self, kind: str, error: Exception) -> None:
        self._guard.caught(kind, error)

    def after_backward(self, before: Any, loss: Loss | None) -> None:
        """Begin the run of a script that has no optimizer and updates its model itself."""
        if self._optimizers:
            if loss is not None and len(self._losses) < MAX_LOSSES:
                self._losses.append(loss)
            return
        with self._guard.shield("looking for the model"):
            models = [(reference(), gradients) for reference, gradients in before]
            trained = [
                later for later, earlier in models if later is not None and _gradients(later) != earlier
            ]
            if not trained:
                return
            unlisten(self)
            if self._ended or self._join_trainer() or self._leave_to_script():
                return
            model = trained[0]
            if self._convert is not None:
                logger.warning("the script has no optimizer: FP8 begins after its first backward pass.")
                self._convert(unwrapped(model))
            self.run = self._begin(config=settings_of_model(unwrapped(model)))
            if not isinstance(self.run, Run):
                self._end()
                return
            self._names.add("")
            attachment = attach_by_hand(self.run, model, tokens_per_step=self._tokens_per_step)
            if attachment is not None:
                attachment.after_backward({}, loss)

    def before_scaler_step(self, optimizer: Optimizer) -> None:
        """Nothing to do: part of `loss_capture.Listener`."""

    def after_scaler_step(self, optimizer: Optimizer, before: Any) -> None:
        """Nothing to do: part of `loss_capture.Listener`."""

    # Starting the run

    def _leave_to_script(self) -> bool:
        """Stop looking if the script records a run itself; returns whether it does."""
        own = (self.run, self._begun())
        if not any(run not in own for run in live_runs):
            return False
        logger.info("the script records a run itself: `fp8scope run` adds nothing to it.")
        self._end()
        return True

    def _found(self, model: nn.Module, called: nn.Module) -> None:
        if self._leave_to_script() or self._join_trainer():
            return
        unlisten(self)
        self._losses.clear()
        self._forget(model)
        outer = called if unwrapped(called) is model else model
        optimizers = [other for other in self._optimizers if holds_parameters_of(other, model)]
        if self._convert is not None:
            self._convert(model)
        if self.run is None or self.run.finished:
            self.run = self._begin(config=settings_of_model(model))
            if not isinstance(self.run, Run):
                self._end()
                return
            self._names.add("")
            # Attach to the compiled wrapper: the model inside runs no hooks.
            attach_run(self.run, outer, optimizers, tokens_per_step=self._tokens_per_step)
        else:
            self._add(self.run, outer, optimizers)
        attachment = attachment_of(self.run)
        if attachment is not None and attachment.name_of(called) is None:
            attachment.follow_calls(attachment.name_of(outer) or "", called)

    def _add(self, run: Run, model: nn.Module, optimizers: list[Optimizer]) -> None:
        """Add another model, or another optimizer of a followed model, to the run."""
        attachment = attachment_of(run)
        if attachment is None:
            return
        new = [other for other in optimizers if other not in attachment.optimizers]
        followed = [attachment.optimizers[other] for other in optimizers if other in attachment.optimizers]
        name = attachment.name_of(model)
        if name is not None:
            for optimizer in new:
                watch(run, model, optimizer, name)
                attachment.follow_optimizer(name, optimizer)
            return
        name = self._free_name(type(model).__name__)
        if followed:
            watch(run, model, None, name)
            attachment.follow_calls(followed[0], model)
        else:
            follow(run, attachment, name, model, new)

    def _free_name(self, name: str) -> str:
        number, free = 1, name
        while free in self._names:
            number += 1
            free = f"{name}_{number}"
        self._names.add(free)
        return free

    def _join_trainer(self) -> bool:
        """Add our callback to the running trainer; returns whether there is one."""
        running = _running_trainer(sys._getframe(1))
        if running is None:
            return False
        self._end()
        integration, trainer = running
        integration.join(trainer, self._begin, self._convert, self._tokens_per_step, self._keep)
        return True

    def _keep(self, run: Run) -> None:
        self.run = run

    def _forget(self, model: nn.Module) -> None:
        """Remove the discovery's hooks from a model."""
        for owner, handle in self._handles:
            if owner() is model:
                handle.remove()
        self._handles = [(owner, handle) for owner, handle in self._handles if owner() not in (model, None)]
        for module, hooked_model in list(self._models.items()):
            if hooked_model is model:
                del self._models[module]

    def _end(self) -> None:
        self._ended = True
        unlisten(self)
        for _, handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._step_handle is not None:
            self._step_handle.remove()
            self._step_handle = None


def models_of(optimizer: Optimizer) -> list[nn.Module]:
    """Return the outermost modules with parameters of the optimizer, largest first."""
    own = {id(parameter) for parameter in parameters_of(optimizer)}
    return models_where(lambda parameter: id(parameter) in own)


def models_where(holds: Callable[[torch.Tensor], bool]) -> list[nn.Module]:
    """Return the outermost modules with a parameter for which `holds` is true, largest first."""
    holding: dict[int, nn.Module] = {}
    parts: set[int] = set()
    for candidate in gc.get_objects():
        # Not isinstance: reading `__class__` of some objects (lazy proxies) has side effects.
        if issubclass(type(candidate), nn.Module) and "_parameters" in candidate.__dict__:
            if any(holds(parameter) for parameter in candidate.parameters()):
                holding[id(candidate)] = candidate
            parts.update(id(child) for child in candidate._modules.values())
    outermost = [module for key, module in holding.items() if key not in parts]
    return sorted(outermost, key=lambda module: -sum(1 for _ in module.parameters()))


def _gradients(model: nn.Module) -> list[tuple[int, int] | None]:
    """Identify the gradients, without reading their values."""
    gradients = [parameter.grad for parameter in model.parameters()]
    return [None if gradient is None else (id(gradient), gradient._version) for gradient in gradients]


def _running_trainer(frame: FrameType | None) -> tuple[Any, Any] | None:
    """Return the integration for a trainer among the callers, and the trainer; None if there is none."""
    classes: list[tuple[type, str]] = []
    for package, name, ours in (
        ("transformers.trainer", "Trainer", "transformers"),
        ("lightning.pytorch", "Trainer", "lightning"),
        ("pytorch_lightning", "Trainer", "lightning"),
    ):
        # Look only at packages that the script has imported.
        library_class = getattr(sys.modules.get(package), name, None)
        if isinstance(library_class, type):
            classes.append((library_class, ours))
    while frame is not None and classes:
        if frame.f_code.co_argcount:
            this = locals_of(frame).get(frame.f_code.co_varnames[0])
            for library_class, ours in classes:
                if issubclass(type(this), library_class):
                    return importlib.import_module(f"fp8scope.integrations.{ours}"), this
        frame = frame.f_back
    return None
