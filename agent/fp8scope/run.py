"""A training run, as the training script sees it."""

import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fp8scope.advice.in_process import send_at_end
from fp8scope.config import ArgumentTypeError, Settings
from fp8scope.control.command_queue import PAUSE_SECONDS, Callback
from fp8scope.control.controller import RunController
from fp8scope.delivery.inbox import Alert
from fp8scope.incidents.flight_recorder import MAX_BYTES, Batches, FlightRecorder
from fp8scope.observe.budget import Overhead, check_overhead
from fp8scope.observe.traces import StepTraces
from fp8scope.process import open_runs
from fp8scope.recording.artefacts import artefact_document
from fp8scope.recording.entries import Document
from fp8scope.recording.evaluation import evaluation_document
from fp8scope.recording.finish_report import FinishReport
from fp8scope.recording.media import (
    MediaKind,
    PendingImage,
    file_content,
    image_content,
    logged,
    table_content,
    text_content,
)
from fp8scope.recording.records import RecordKind, dump_json
from fp8scope.recording.registration import (
    Entries,
    blank_registration,
    check_registration,
    plain_entries,
)
from fp8scope.scalars import is_tensor
from fp8scope.session.resume import Identity
from fp8scope.session.session import FINISH_SECONDS, Session
from fp8scope.step import Step, as_mapping

if TYPE_CHECKING:
    import torch

    from fp8scope.control.bisection import Bisection, LossFunction
    from fp8scope.control.precision import Pattern, Precision
    from fp8scope.control.reference_window import Policy, TrainStep
    from fp8scope_kernels import Recipe
    from fp8scope_kernels.convert import Selection


def _is_compiling() -> bool:
    """Return whether torch traces the calling code for a compiled graph."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


class Run:
    """A run that is being recorded; made by `fp8scope.init`. Only one thread at a time may use it.

    `session`, `controller` and `flight` are for fp8scope's own parts; a training script does not need them.
    """

    def __init__(
        self,
        settings: Settings,
        registration: Mapping[str, Any],
        *,
        rank: int = 0,
        identity: Identity | None = None,
        commands: Sequence[str] | None = None,
    ) -> None:
        self.session = Session(settings, registration, identity or Identity(str(uuid.uuid4())), rank=rank)
        self.controller = RunController(self.session, commands)
        self.guard = self.session.guard
        self.flight = FlightRecorder(self.session, self.controller)
        # Imported before the end: what defines a class then makes Python forget that Ctrl-C has ended it.
        self.session.before_end.append(partial(send_at_end, self.flight))
        self.shadow: Recipe | None = None
        """The recipe of `watch` where none is given."""
        self._steps = self.session.steps
        if settings.trace_steps:
            self.trace_steps(*settings.trace_steps)
        self.session.start(self.controller)
        open_runs.opened(self)

    # What it is

    @property
    def id(self) -> str:
        """The run's UUID."""
        return self.session.writers.run

    @property
    def name(self) -> str:
        """The run's name, as given to `init`."""
        return self.session.name

    @property
    def url(self) -> str:
        """The address of the run's page, once the server has answered; empty before."""
        return self.session.page

    @property
    def directory(self) -> Path:
        """The folder of this run's spool."""
        return self.session.writers.pipeline.directory

    @property
    def finished(self) -> bool:
        """Return whether the run has ended."""
        return self.session.report is not None

    @property
    def attempt(self) -> int:
        """Return how many times this run was begun before, here or elsewhere."""
        return self.session.writers.origin.attempt

    @property
    def margin(self) -> float | None:
        """The project's margin: relative differences of the loss up to it count as none. None before the
        server has answered.
        """
        return self.controller.margin

    # Watching

    def watch(
        self,
        model: "torch.nn.Module",
        optimizer: "torch.optim.Optimizer | None" = None,
        *,
        every: int | None = None,
        shadow: "Recipe | None" = None,
        include: "Selection | None" = None,
        scaler: "torch.amp.GradScaler | None" = None,
        overhead: Overhead = "default",
        readiness: bool = False,
    ) -> int:
        """Observe `model` from the next step on; returns the number of tensors observed.

        FP8 layers are observed (fp8scope's, torchao's, Transformer Engine's), and the linear layers that
        `convert` would make FP8. Of the latter, which are not quantised, amax and non-finite elements are
        recorded, so that a BF16 run can be compared with an FP8 run.

        Each step's time, memory and FLOP/s are measured; with `optimizer` also the learning rate and the
        gradient norm. `fp8scope.observe.timing` lists these values.

        `shadow`: a recipe under which the linear layers' tensors are quantised as well, without changing the
        training. `include` selects other modules for it. `scaler`: the GradScaler whose factor is divided out
        of the gradients.

        `readiness`: also record the exponents of these tensors, for the run's page of FP8 readiness. It casts
        nothing and needs one more pass over each tensor in sampled steps. `shadow` records them anyway.

        `every`: expensive statistics are collected only on step 1 and every `every` steps after that (100;
        0: never). These are the shadow's casts, exponents and quantisation errors, and with `optimizer` also
        weight gradients, moments and updates. docs/watching.md lists them.

        `overhead`: the share of the steps' time that watching may take, above 0 and at most 1; None for no
        limit. The default is FP8SCOPE_OVERHEAD, else 0.02. The agent measures its time and, to stay within
        the limit, reads the tensors of layers that are not FP8 in fewer steps (every second, fourth, ...).
        Losses and the counters of FP8 layers are recorded at every step. The limit holds for the whole run.

        Raises ConfigurationError if `overhead` is invalid, and nothing else.

        The model keeps no reference to the run: it can be copied and pickled as before.
        """
        count = 0
        if overhead != "default":
            self._steps.budget.limit(check_overhead(overhead))
        with self.guard.shield("watching the model"):
            if self._steps.active:
                self.controller.watch(model)
                count = self.session.watch(
                    model,
                    optimizer,
                    every=every,
                    shadow=shadow or self.shadow,
                    include=include,
                    scaler=scaler,
                    readiness=readiness is True,
                )
        return count

    def note_attention(
        self, path: str, query: "torch.Tensor", key: "torch.Tensor", scale: float | None = None
    ) -> None:
        """In sampled steps, note a bound of the attention logits that a module is about to compute.

        Only needed where the module does not call torch's `scaled_dot_product_attention`, which is observed
        by itself. `path` names the module. `query` is [..., heads, queries, features] and `key` [..., key
        heads, keys, features]; `scale` multiplies their products, 1 / sqrt(features) by default. Call it in
        the forward pass of a watched model. In a compiled graph it does nothing.
        """
        if self._steps.active and not _is_compiling():
            with self.guard.shield("noting attention logits"):
                self._steps.collector.note_attention(str(path), query, key, scale)

    def note_experts(self, path: str, chosen: "torch.Tensor", experts: int) -> None:
        """In sampled steps, note how even the load of a mixture of experts is.

        Only needed where `watch` does not find the router by itself; see docs/watching.md. `path` names the
        module; `chosen` holds the index of an expert for each choice, integers of any shape; `experts` is
        their number. Call it in the forward pass of a watched model. In a compiled graph it does nothing.
        """
        if self._steps.active and not _is_compiling():
            with self.guard.shield("noting the load of experts"):
                self._steps.collector.note_experts(str(path), chosen, experts)

    # Steps and values

    def step(self, tokens: int = 0, *, number: int | None = None) -> Step:
        """A `with` block around one optimizer step that trains on `tokens` tokens.

        Steps are numbered from 1. `number` sets the number of this step, and later steps continue from it.
        """
        if number is not None or type(tokens) is not int:
            return self._numbered_step(tokens, number)
        steps = self._steps
        steps.number = following = steps.number + 1
        try:
            steps.collector.begin(following)
        except Exception as error:
            self.guard.caught("beginning a step", error)
        return Step(steps, following, tokens)

    def _numbered_step(self, tokens: Any, number: Any) -> Step:
        """`step` with a number, or with tokens that are not a plain integer."""
        steps, counted = self._steps, 0
        following = steps.number + 1
        with self.guard.shield("beginning a step"):
            if number is not None:
                if int(number) < 0:
                    raise ValueError(f"a step's number must not be negative, got {number}")
                following = int(number)
            if is_tensor(tokens):
                raise TypeError("tokens must be a plain number: reading a tensor would wait for the device")
            counted = int(tokens)
            steps.collector.begin(following)
        steps.number = following
        return Step(steps, following, counted)

    def log(
        self, scalars: Mapping[str, Any] | None = None, /, *, step: int | None = None, **named: Any
    ) -> None:
        """Add values to the open step, as `Step.log` does; before the first step, to that.

        After `fp8scope.attach` a step is open until the forward pass of the next one begins, so values that
        are logged right after `optimizer.step()` belong to it. `tokens=` sets how many tokens the step trains
        on.

        `step` is the number of the step that the values belong to. Use it in a script that has no steps
        otherwise: calls with the same number make one step, which is recorded when a later one begins. Values
        for an earlier number are counted as an error and not recorded. If steps are made by `run.step` or
        found by `attach`, values are added to those, whatever number is given.
        """
        values = as_mapping(self.guard, scalars, named)
        if self.session.report is not None:
            self.guard.warn_once("log", "run.log: the run is finished; what is logged now is not recorded.")
            return
        steps = self._steps
        if step is not None:
            with self.guard.shield("logging at a step"):
                if steps.active:
                    steps.log_at(step, values)
        elif steps.open is not None and "tokens" not in values:
            # The common case, without a further call.
            steps.open.log(values)
        else:
            steps.log(values)

    def log_eval(
        self,
        name: str,
        metric: str,
        items: Any,
        *,
        kind: str = "proportion",
        step: int | None = None,
        higher_is_better: bool = True,
        item_ids: Sequence[str] | None = None,
        clusters: Sequence[str] | None = None,
        precision: str | None = None,
        margin: float | None = None,
        matrix: Mapping[str, float] | None = None,
    ) -> None:
        """Record an evaluation's score of every item, so that its interval can be computed.

        `items`: a sequence, array or tensor of numbers; 0 or 1 for `kind="proportion"`, any finite number for
        `"mean"`. `step` defaults to the last one. `item_ids` pair the items with those of other runs.
        `clusters` name items that belong together, such as questions about one text.
        `precision` is that of the evaluation's forward pass: "bf16", "fp8", "fp16" or "fp32". `margin` is the
        largest difference of the score that counts as none, in the unit of the score (0.01 is one point of
        accuracy); the dashboard has a default for each metric. An invalid evaluation is left out, with one
        warning.

        `evaluate_matrix` sets `matrix`: the scores are then a cell of the matrix, and not of the run against
        its baseline.
        """
        with self.guard.shield(f"recording the evaluation {name!r}"):
            if is_tensor(items):
                items = items.detach().double().cpu().numpy()
            document = evaluation_document(
                name,
                metric,
                items,
                kind=kind,
                step=self._steps.number if step is None else step,
                higher_is_better=higher_is_better,
                item_ids=item_ids,
                clusters=clusters,
                precision=precision,
                margin=margin,
                matrix=matrix,
            )
            if self._steps.active:
                self.session.writers.put(Document(RecordKind.EVALUATION, lambda: dump_json(document)))

    # What describes it

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Add entries to the run's configuration; existing keys are replaced."""
        registration = self.session.registration
        with self.guard.shield("recording the configuration"):
            if self._steps.active:
                stored = registration.document["config"]
                registration.document["config"] = {**stored, **plain_entries(config)}
                registration.send()

    @property
    def config(self) -> Entries:
        """The run's configuration. Entries can be set while it runs; `log_config` sends them at once."""
        return self._entries("config")

    @property
    def summary(self) -> Entries:
        """Results of the whole run, such as its best score. Only the script sets them."""
        return self._entries("summary")

    def _entries(self, kind: str) -> Entries:
        document = self.session.registration.document
        return Entries(lambda: document.get(kind, {}), lambda new: self._add_entries(kind, new))

    def _add_entries(self, kind: str, new: Mapping[str, Any]) -> None:
        registration = self.session.registration
        with self.guard.shield(f"setting the {kind}"):
            if not self._is_over(kind):
                registration.set(kind, {**registration.document.get(kind, {}), **plain_entries(new)})

    @property
    def tags(self) -> tuple[str, ...]:
        """The run's tags, at most 50. Setting them replaces them: `run.tags += ("diverged",)`."""
        return tuple(self.session.registration.document["tags"])

    @tags.setter
    def tags(self, tags: Sequence[str]) -> None:
        registration = self.session.registration
        with self.guard.shield("setting the tags"):
            chosen = list(dict.fromkeys(map(str, (tags,) if isinstance(tags, str) else tags)))
            check_registration({**registration.document, "tags": chosen})
            if not self._is_over("tags"):
                # Without it other ranks, which still send their first tags, would undo the change.
                registration.document["replace_tags"] = True
                registration.set("tags", chosen)

    def _is_over(self, kind: str) -> bool:
        if self.finished:
            self.guard.warn_once(kind, "run.%s: the run is finished; what is set now is not recorded.", kind)
        return self.finished

    # Control

    def on_alert(self, callback: Callable[[Alert], object]) -> None:
        """Call `callback(alert)` for every alert that the server raises for this run.

        The training thread calls it at the end of a step or in `finish`, so it may touch the model. Its
        exceptions are raised there.
        """
        if not callable(callback):
            raise ArgumentTypeError(f"on_alert needs something to call, got {callback!r}.")
        self.session.alerts.callbacks.append(callback)

    def on_command(self, name: str, callback: Callback) -> None:
        """Call `callback(command)` when somebody asks for `name` on the run's page, e.g. "checkpoint".

        The training thread calls it at the end of a step, so it may touch model and optimizer. A text that it
        returns is shown as the result. Its exceptions are shown, and raised there. Raises TypeError or
        ConfigurationError at once for an invalid callback or name.
        """
        self.controller.on_command(name, callback)

    def allow_pause(self, seconds: float = PAUSE_SECONDS) -> None:
        """Let people hold the training between two steps, for at most `seconds` at a time (3600 at most).

        If several ranks wait for each other, it must be less than the timeout of their collectives.
        """
        self.controller.allow_pause(seconds)

    def annotate(self, text: str, why: str = "", name: str = "note") -> None:
        """Mark the current step in the run's loss chart: what was done, and why."""
        self.controller.annotate(text, why, name)

    def log_artefact(self, name: str, address: str, *, step: int | None = None) -> None:
        """Link something that belongs to the run and is kept elsewhere, such as a checkpoint or a data set.

        `address` begins with `http://`, `https://`, `s3://`, `gs://` or `file://`, or is a path, which is
        made absolute. Nothing is read or uploaded. `step` defaults to the last one. The same address again
        replaces its name and step. An invalid link is left out, with one warning.
        """
        with self.guard.shield(f"linking the artefact {name!r}"):
            link = artefact_document(name, address)
            self.controller.link(link, self._steps.number if step is None else int(step))

    def log_image(self, name: str, image: Any, *, step: int | None = None, caption: str = "") -> None:
        """Record an image at a step, by default the last one.

        `image`: a PIL image, a matplotlib figure, an array or a tensor [H, W], [H, W, C] or [C, H, W] with 1,
        3 or 4 channels (floats from 0 to 1, or bytes), or a path or the bytes of a PNG, JPEG, WebP or GIF,
        which are kept as they are. It is copied here and encoded by another thread. A tensor on a device is
        copied to the host, which waits for the device. At most 8 MiB encoded, 16 million pixels.

        What exceeds a bound or is no image is left out, with one warning; so for all four kinds of media.
        """
        with self.guard.shield(f"logging the image {name!r:.100}"):
            if self.session.active:
                self._log_media("image", name, image_content(image), step, caption)

    def log_text(self, name: str, text: str, *, step: int | None = None, caption: str = "") -> None:
        """Record a text at a step, such as a sample of the model: 64 KiB of it. `caption`: its prompt."""
        with self.guard.shield(f"logging the text {name!r:.100}"):
            if self.session.active:
                body, is_cut = text_content(text)
                self._say_cut(name, is_cut)
                self._log_media("text", name, body, step, caption)

    def log_table(
        self,
        name: str,
        table: Any = None,
        *,
        columns: Sequence[Any] | None = None,
        rows: Iterable[Sequence[Any]] | None = None,
        step: int | None = None,
        caption: str = "",
    ) -> None:
        """Record a table at a step: its first 1,000 rows and 64 columns.

        `table`: a pandas or Polars data frame, a pyarrow table, or a mapping of names to columns; else give
        `columns` and `rows`. Numbers, truths and None stay as they are, other cells become texts.
        """
        with self.guard.shield(f"logging the table {name!r:.100}"):
            if self.session.active:
                body, is_cut = table_content(table, columns, rows)
                self._say_cut(name, is_cut)
                self._log_media("table", name, body, step, caption)

    def log_file(self, name: str, path: "str | Path", *, step: int | None = None, caption: str = "") -> None:
        """Record the content of a file, at most 8 MiB. `log_artefact` links larger ones.

        It is read here, so that it may change or go afterwards.
        """
        with self.guard.shield(f"logging the file {name!r:.100}"):
            if self.session.active:
                self._log_media("file", name, file_content(path), step, caption, Path(path).name)

    def _log_media(
        self,
        kind: MediaKind,
        name: str,
        content: bytes | PendingImage,
        step: int | None,
        caption: str,
        file_name: str = "",
    ) -> None:
        number = self._steps.number if step is None else int(step)
        self.session.log_media(logged(kind, name, content, step=number, caption=caption, file_name=file_name))

    def _say_cut(self, name: str, is_cut: bool) -> None:
        if is_cut:
            self.guard.warn_once(f"cut {name}", "%s is too large; its beginning is recorded.", name)

    def trace_steps(self, *steps: int) -> None:
        """Trace these steps by torch's profiler, and link each trace to the run's page. At most 16.

        A trace is a file beside the run's spool, which Perfetto (ui.perfetto.dev) opens. The run's page
        shows the time of the last one by layer and by kind of operator. Tracing slows its step down. Where a
        step is not measured, the next measured one is traced. FP8SCOPE_TRACE_STEPS sets the same. Called
        again, it replaces the steps that have not come yet.
        """
        with self.guard.shield("choosing steps to trace"):
            self._steps.traces = StepTraces(
                [int(number) for number in steps],
                self.guard,
                self._trace_path,
                self._trace_kept,
                models=lambda: self._steps.measures.models,
                on_table=self.session.note_step_times,
            )

    def _trace_path(self, step: int) -> Path:
        rank = self.session.writers.origin.rank
        return self.directory.parent / "traces" / f"step-{step}-rank-{rank}.json.gz"

    def _trace_kept(self, step: int, path: Path) -> None:
        rank = self.session.writers.origin.rank
        self.log_artefact(f"Trace of step {step}, rank {rank}", str(path), step=step)

    def fallback(
        self, pattern: "Pattern | Sequence[Pattern]", precision: "Precision" = "bf16", why: str = ""
    ) -> tuple[str, ...]:
        """Compute the watched layers that `pattern` matches in BF16 (or, `precision="fp8"`, in FP8 again).

        `pattern`: a glob over module paths such as `blocks.*.mlp.down`, a compiled regular expression, or
        several of them. The change takes effect at the next step boundary (at once in a callback of
        `on_alert` or `on_command`) and is marked on the run's page with `why`. Returns the layers' paths.

        Layers that cannot be switched (Transformer Engine, FP8 gathered by FSDP) cause a warning. CUDA graphs
        that were captured before do not change. A layer that returns to FP8 starts with fresh scales.
        """
        return self.controller.fallback(pattern, precision, why)

    def reference_window(
        self,
        train_step: "TrainStep",
        model: "torch.nn.Module",
        optimizer: "torch.optim.Optimizer | Sequence[torch.optim.Optimizer]",
        *,
        every: int,
        steps: int,
        scheduler: Any = None,
        also: Sequence[Any] = (),
        policy: "Policy" = "report",
        tolerance: float | None = None,
        keep_on: str = "cpu",
    ) -> "TrainStep":
        """Every `every` calls, train `steps` batches in BF16 as well, compare the losses, restore the run.

        `train_step` makes one whole step of a batch (forward, backward, optimizer) and returns the loss. Call
        the returned function in its place; see `fp8scope.control.reference_window`. Raises ConfigurationError
        if an argument is invalid.
        """
        return self.controller.reference_window(
            train_step, model, optimizer,
            every=every, steps=steps, scheduler=scheduler, also=also,
            policy=policy, tolerance=tolerance, keep_on=keep_on,
        )  # fmt: skip

    def bisect(
        self, batch: Any, loss_fn: "LossFunction", model: "torch.nn.Module | None" = None
    ) -> "Bisection":
        """Rank the matrix products by how much FP8 changes the gradient, each in FP8 alone against all-BF16.

        `loss_fn(batch)` computes the loss with the watched model (or `model`), without calling backward. It
        takes three forward and backward passes for every FP8 layer, and memory for two more sets of
        gradients. Model, gradients, random state and scales are restored. Call it between two steps.

        Returns the ranking, and shows it on the run's page. Raises ValueError if there is no FP8 layer, and
        whatever `loss_fn` raises.
        """
        return self.controller.bisect(batch, loss_fn, model)

    # Incidents

    def batches(self, source: Iterable[Any]) -> Batches:
        """Return an iterable of the same batches: `for batch in run.batches(loader):`.

        It shows the flight recorder which batches each step trains on. `fp8scope replay` needs it to train a
        step again, and to leave batches out. See docs/incidents.md.
        """
        return self.flight.batches(source)

    def allow_snapshots(
        self,
        model: "torch.nn.Module | Sequence[torch.nn.Module]",
        optimizer: "torch.optim.Optimizer | Sequence[torch.optim.Optimizer]",
        *,
        every: int = 100,
        also: Sequence[Any] = (),
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Let the flight recorder copy the state of the training every `every` steps, for `fp8scope replay`.

        It keeps the two latest copies in host memory, and the batches since then, and writes them to disk
        with an incident. `also`: further objects with a `state_dict`, such as a scheduler or a GradScaler.
        No copies are taken if two of them would exceed `max_bytes`. With `every=0` there are none; a replay
        then runs the script from its beginning. Needs `run.batches`.

        Raises ConfigurationError if an argument is invalid.
        """
        self.flight.allow_snapshots(model, optimizer, every=every, also=also, max_bytes=max_bytes)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what to save in a checkpoint, so that the run can be continued from it: plain numbers and
        texts.

        Pass it to `init(resume=...)`, or to `load_state_dict` right after `init`.
        """
        return self.session.identity.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a checkpoint was taken: in its run, after its last step.

        If this process has recorded steps of another run, that run ends. Without any step it leaves no trace,
        unless the server knows of it already, which happens two seconds after `init`.
        """
        with self.guard.shield("loading the run's state"):
            self.session.load(state)

    # The end

    def detach(self) -> None:
        """Undo `fp8scope.attach`: steps are no longer found automatically. The run goes on."""
        self.session.detach()

    def finish(self, timeout: float = FINISH_SECONDS) -> FinishReport:
        """End the run and wait, at most `timeout` seconds, until the server has everything.

        Data that is left then stays on disk for `fp8scope sync`. Calling it again returns the first report.
        """
        if self.session.report is not None:
            return self.session.report
        report = self.session.finish(timeout)
        open_runs.closed(self)
        # Last, because a callback may raise.
        self.session.alerts.deliver()
        return report

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.session.note_failure(error)
        self.finish()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A copy of a model that holds its run refers to the same run.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process gets a disabled run: this process goes on recording.
        return disabled_run, (self.name,)


def disabled_run(name: str = "") -> Run:
    """A run that records nothing."""
    return Run(Settings(mode="disabled"), blank_registration(name))
