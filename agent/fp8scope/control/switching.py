"""Layers change their precision while the run goes on: at a step's boundary, and with a mark on its page.

What asks for it is the training script (`Run.fallback`), a person or a rule (the command `fallback`), or a
comparison with BF16 (`fp8scope.control.reference_window`). `fp8scope.control.precision` switches a layer.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fp8scope.control.command_queue import Command, RefusedError

if TYPE_CHECKING:
    from torch import nn

    from fp8scope.control.precision import Found, Layers, Pattern, Precision
    from fp8scope.guard import Guard

MAX_LAYERS_NAMED = 500
MAX_PATTERNS = 100


class Switching:
    """A part of `Controls`, which provides what is declared here."""

    guard: "Guard"
    _quiet: bool

    if TYPE_CHECKING:

        def _mark(self, name: str, text: str, why: str, layers: Sequence[str]) -> None: ...

    def _init_switching(self) -> None:
        self._layers: Layers | None = None
        self._switches: list[tuple[Found, Precision, str]] = []
        """What waits for the next boundary."""

    def fallback(
        self, pattern: "Pattern | Sequence[Pattern]", precision: "Precision" = "bf16", why: str = ""
    ) -> tuple[str, ...]:
        """Compute the watched layers that `pattern` matches in BF16 (or, `precision="fp8"`, in FP8 again).

        `pattern`: a glob over module paths such as `blocks.*.mlp.down`, a compiled regular expression, or
        several. It takes effect at the next step boundary (in a callback of `on_alert` or `on_command`: now),
        on the training thread, and is recorded on the run's page with `why`. Returns the paths of the layers.
        What cannot be switched (Transformer Engine, FP8 gathered by FSDP) is told. CUDA graphs that were
        captured before go on as they are. Scales begin afresh when a layer comes back.
        """
        with self.guard.shield("falling back"):
            if precision not in ("bf16", "fp8"):
                raise ValueError(f"precision must be 'bf16' or 'fp8', got {precision!r}")
            found = self._find_layers(pattern)
            if found.layers:
                self._switches.append((found, precision, str(why)))
            return found.paths
        return ()

    def _watch_layers(self, model: "nn.Module") -> None:
        """Let this model's layers fall back."""
        from fp8scope.control.precision import Layers

        if self._layers is None:
            self._layers = Layers()
        self._layers.watch(model)

    def _find_layers(self, pattern: "Pattern | Sequence[Pattern]") -> "Found":
        from fp8scope.control.precision import Found

        found = Found() if self._layers is None else self._layers.find(pattern)
        for problem in found.problems[:3]:
            self.guard.tell_once(f"fallback {problem}", "cannot change the precision of %s.", problem)
        if not found.layers:
            self.guard.tell_once(
                f"fallback nothing {pattern!r}", "fallback(%r) matches no watched FP8 layer.", pattern
            )
        return found

    def _switch_layers(self) -> None:
        """What was asked for by `fallback` takes effect: a step is over, or about to begin."""
        if not self._switches or self._quiet:
            return
        with self.guard.shield("falling back"):
            while self._switches:
                found, precision, why = self._switches.pop(0)
                self._switch(found, precision, why)

    def _switch(
        self, found: "Found", precision: "Precision", why: str, *, only_fallen: bool = False
    ) -> list[str]:
        """Switch layers now, and record it."""
        assert self._layers is not None
        changed = self._layers.switch(found, precision, only_fallen=only_fallen)
        if changed:
            count = f"{len(changed)} layer{'' if len(changed) == 1 else 's'}"
            text = (
                f"{count} to {precision.upper()}: {', '.join(changed[:3])}{', …' if len(changed) > 3 else ''}"
            )
            self._mark("fallback", text, why, changed[:MAX_LAYERS_NAMED])
        return changed

    def _fall_back_as_asked(self, command: Command) -> str:
        """The command `fallback`. Its patterns are globs: a regular expression may take for ever."""
        patterns, precision = command.arguments.get("patterns"), command.arguments.get("precision", "bf16")
        if not isinstance(patterns, list) or not all(isinstance(one, str) for one in patterns):
            raise RefusedError("The command names no layers.")
        if precision not in ("bf16", "fp8"):
            raise RefusedError(f"There is no precision {str(precision)[:20]!r} to change to.")
        if self._layers is None:
            raise RefusedError("No model is watched: run.watch(model).")
        found = self._layers.find([pattern[:512] for pattern in patterns[:MAX_PATTERNS]])
        problems = "; ".join(found.problems[:3])
        if not found.layers:
            raise RefusedError(problems or "No watched FP8 layer has such a name.")
        why = f"{command.given_by or 'somebody'}: {command.reason}".rstrip(": ")
        changed = self._switch(found, precision, why, only_fallen=True)
        if not changed and precision == "fp8":
            raise RefusedError("None of these layers has fallen back.")
        said = f"{len(changed)} of {len(found.layers)} layers changed to {precision.upper()}."
        return f"{said} Not: {problems}" if problems else said
