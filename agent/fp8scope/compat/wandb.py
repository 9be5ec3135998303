"""The common part of W&B's interface: `import fp8scope.compat.wandb as wandb` records to fp8scope only.

Values go through the capture, so that a script is recorded as with W&B itself. Where a run is being recorded
already, by `fp8scope.attach` or `fp8scope run`, `init` begins no other. What W&B has beyond this raises an
AttributeError that says so.
"""

import logging
import os
import secrets
import uuid
from collections.abc import Mapping, Sequence
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, Self

from fp8scope.capture.joining import Joined, join
from fp8scope.capture.trackers.wandb import NAME, StepCounter, take_logged
from fp8scope.compat.wandb_entries import LoggedImage, LoggedTable, Media, WandbEntries, WandbSettings

if TYPE_CHECKING:
    import fp8scope.run

MODES = {
    "online": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
    "shared": "online",
    "run": "online",
}
"""W&B's modes, and those of fp8scope."""
logger = logging.getLogger("fp8scope")


class WandbError(RuntimeError):
    """Raised where W&B raises its `Error`: something is called before `init`."""


def _media(name: str) -> type[Media]:
    return type(name, (Media,), {"__doc__": Media.__doc__})


Image, Table = LoggedImage, LoggedTable
Audio, Graph, Histogram, Html = map(_media, ("Audio", "Graph", "Histogram", "Html"))
Molecule, Object3D, Plotly, Video = map(_media, ("Molecule", "Object3D", "Plotly", "Video"))


class WandbRun:
    """A run in the terms of W&B, which records to a run of fp8scope."""

    def __init__(self, joined: Joined, **facts: Any) -> None:
        """`joined`: the run that it records to. `facts`: the arguments of `init`."""
        self._inner = joined.run
        self._owns = joined.owns
        self._capture = capture = joined.capture
        self._counter = StepCounter()
        self._facts = facts
        self._id = facts.get("id") or generate_id()
        self.settings = facts.get("settings") or WandbSettings()
        self.config = WandbEntries(lambda new: capture.configure(NAME, new))
        self.summary = WandbEntries(lambda new: capture.summarise(NAME, new))
        self.step = 0
        """W&B's step of the next call."""

    @property
    def id(self) -> str:
        """The id of fp8scope's run; before it has begun, the one given to `init` or a random one."""
        inner = self._recorded
        return inner.id if inner is not None and not self._facts.get("id") else self._id

    @property
    def name(self) -> str:
        """The run's name."""
        inner = self._recorded
        return inner.name if inner is not None else str(self._facts.get("name") or self._id)

    @property
    def url(self) -> str:
        """The address of the run's page, once the server has answered; empty before."""
        inner = self._recorded
        return "" if inner is None else inner.url

    @property
    def project(self) -> str:
        """The project's name, as given to `init`."""
        return str(self._facts.get("project") or "")

    @property
    def entity(self) -> str:
        """The entity's name, as given to `init`."""
        return str(self._facts.get("entity") or "")

    @property
    def group(self) -> str:
        """The run's group."""
        return str(self._facts.get("group") or "")

    @property
    def tags(self) -> tuple[str, ...]:
        """The run's tags."""
        return tuple(self._facts.get("tags") or ())

    @property
    def notes(self) -> str:
        """The run's notes, as given to `init`."""
        return str(self._facts.get("notes") or "")

    @property
    def disabled(self) -> bool:
        """Return whether nothing is recorded."""
        inner = self._recorded
        return inner is not None and inner.session.settings.mode == "disabled"

    @property
    def _recorded(self) -> "fp8scope.run.Run | None":
        return self._inner or self._capture.run

    def get_url(self) -> str:
        """Return `url`."""
        return self.url

    def project_name(self) -> str:
        """Return `project`."""
        return self.project

    def log(self, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        """Record values. W&B's steps are kept beside the steps of the run.

        Raises TypeError as W&B does, if `data` is no mapping with texts as names.
        """
        if not isinstance(data, Mapping):
            raise TypeError("wandb.log must be passed a dictionary")
        if any(not isinstance(name, str) for name in data):
            raise TypeError("Key values passed to `wandb.log` must be strings.")
        commits = bool(commit) or (commit is None and step is None)
        count = self._counter.next(self, step, commits=commits)
        take_logged(self._capture, data, count)
        self.step = self._counter.current(self)
        self.summary._entries.update(data)

    def define_metric(self, name: str, step_metric: Any = None, **how: Any) -> SimpleNamespace:
        """Note by which value others are shown."""
        if step_metric is not None:
            self._capture.note_step_metric(NAME, name, getattr(step_metric, "name", step_metric))
        return SimpleNamespace(name=name)

    def watch(self, *models: Any, **how: Any) -> None:
        """Do nothing but say so: `fp8scope.attach` observes models."""
        logger.info("wandb.watch does nothing here: fp8scope.attach or `fp8scope run` observe the model.")

    def unwatch(self, *models: Any) -> None:
        """Do nothing."""

    def finish(self, exit_code: int | None = None, quiet: bool | None = None) -> None:
        """End the run, if `init` has begun it."""
        global run
        if self._owns and self._inner is not None:
            if exit_code:
                self._inner.session.note_exit(f"wandb.finish(exit_code={exit_code})")
            self._inner.finish()
        if run is self:
            run = None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"fp8scope.compat.wandb: a run has no {name!r}; {_HAS_RUN}.")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._owns and self._inner is not None:
            self._inner.session.note_failure(error)
        self.finish()


run: WandbRun | None = None
"""The run that `init` began last; None before, and after `finish`."""
Run = WandbRun
Settings = WandbSettings
Error = WandbError


def init(
    project: str | None = None,
    entity: str | None = None,
    name: str | None = None,
    config: Any = None,
    group: str | None = None,
    tags: Sequence[str] | None = None,
    notes: str | None = None,
    id: str | None = None,
    resume: Any = None,
    mode: str | None = None,
    settings: Any = None,
    dir: Any = None,
    job_type: str | None = None,
    reinit: Any = None,
    **ignored: Any,
) -> WandbRun:
    """Begin a run, or take part in the one that is being recorded.

    `project`, `entity`, `job_type` and `notes` become entries of `wandb` in the configuration: a token of
    fp8scope belongs to one project. `resume` needs the id of a run of fp8scope. Other arguments of W&B are
    ignored.
    """
    global run
    if run is not None and run._inner is not None and run._inner.finished:
        run = None
    if run is not None and not reinit:
        return run
    mode = mode or getattr(settings, "mode", None) or os.environ.get("WANDB_MODE")
    if mode is not None and mode not in MODES:
        raise WandbError(f"mode must be one of {', '.join(MODES)}, got {mode!r}.")
    facts = {"project": project, "entity": entity, "notes": notes, "job_type": job_type}
    if run is not None:
        run.finish()
    joined = join(lambda: _begin(name=name, group=group, tags=tags, mode=mode, resume=resume, id=id, dir=dir))
    capture = joined.capture
    run = WandbRun(joined, id=id, name=name, group=group, tags=tags, settings=settings, **facts)
    described = {key: value for key, value in facts.items() if value}
    if described:
        capture.configure(NAME, {NAME: described})
    run.config.update(config or {})
    return run


def _begin(
    *, name: str | None, group: str | None, tags: Any, mode: str | None, resume: Any, id: str | None, dir: Any
) -> "fp8scope.run.Run":
    import fp8scope

    resumed = None
    if resume and resume != "never":
        resumed = "auto" if resume == "auto" else id
        if resumed not in (None, "auto") and not _is_uuid(str(resumed)):
            logger.warning("wandb.init: %r is no id of a run of fp8scope; another run begins.", id)
            resumed = None
    return fp8scope.init(
        name=name,
        group=group,
        tags=tags,
        mode=MODES[mode] if mode is not None else None,
        resume=resumed,
        directory=None if dir is None else os.path.join(dir, "fp8scope"),
    )


def _is_uuid(text: str) -> bool:
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True


def log(data: Mapping[str, Any], step: int | None = None, commit: bool | None = None) -> None:
    """Record values in the run of `init`."""
    _begun("log").log(data, step, commit)


def define_metric(name: str, step_metric: Any = None, **how: Any) -> SimpleNamespace:
    """Note by which value others are shown."""
    return _begun("define_metric").define_metric(name, step_metric, **how)


def watch(*models: Any, **how: Any) -> None:
    """Do nothing but say so."""
    _begun("watch").watch(*models, **how)


def unwatch(*models: Any) -> None:
    """Do nothing."""


def finish(exit_code: int | None = None, quiet: bool | None = None) -> None:
    """End the run of `init`, if there is one."""
    if run is not None:
        run.finish(exit_code)


def login(*args: Any, **kwargs: Any) -> bool:
    """Do nothing: `fp8scope login` stores the token."""
    return True


def generate_id(length: int = 8) -> str:
    """Return a random id."""
    return "".join(secrets.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(length))


util = SimpleNamespace(generate_id=generate_id)


def _begun(name: str) -> WandbRun:
    if run is None:
        raise WandbError(f"call wandb.init() before wandb.{name}()")
    return run


_HAS = (
    "it has init, log, config, summary, finish, define_metric, watch, login, Settings, Image, Table, "
    "util.generate_id and placeholders such as Histogram"
)
_HAS_RUN = (
    "it has log, config, summary, finish, define_metric, watch, id, name, url, project, group, tags, step"
)


def __getattr__(name: str) -> Any:
    if name in ("config", "summary"):
        if run is None:
            raise AttributeError(f"call wandb.init() before using wandb.{name}")
        return getattr(run, name)
    raise AttributeError(f"fp8scope.compat.wandb has no {name!r}: {_HAS}.")
