"""The attempt of the training to which each value belongs.

A file holds values in the order in which they were written. A process that resumes writes a new file, which
begins at an earlier step than the last one of the file before. TensorBoard shows both. Here the later attempt
replaces what came before, as for runs of the agent.
"""

from dataclasses import dataclass, field

from fp8scope.event_files.names import is_loss


@dataclass(slots=True)
class AttemptStart:
    """A start of the training, and the step from which on it replaces earlier ones."""

    number: int
    first_step: int


@dataclass(slots=True, kw_only=True)
class FileState:
    """The state of one file.

    Attributes:
        index: how many attempts have begun within the file.
        attempt: that of its next value.
        furthest: the largest step of this stretch of the file.
        lead: the tag that tells whether the training has gone back: the loss, or else the first that moves.
        is_decided: whether it is known that the file goes on from, or goes back behind, earlier files.
        tags: those that were written before it was decided.
    """

    name: str
    index: int = 0
    attempt: AttemptStart | None = None
    furthest: int = -1
    lead: str = ""
    lead_step: int = -1
    is_decided: bool = False
    tags: set[str] = field(default_factory=set)


@dataclass(slots=True, frozen=True)
class Place:
    """The stream of rows that a value belongs to.

    Attributes:
        stream: names it: the same in each process that reads the same files.
        is_late: its step is before that of a value that came earlier, as of another axis.
        begins_at: the step from which on the attempt replaces earlier ones.
    """

    stream: str
    attempt: int
    is_late: bool
    begins_at: int


class AttemptFinder:
    """Finds the attempts of one run. Its files must be given in their order."""

    def __init__(self) -> None:
        self.attempts = [AttemptStart(0, 0)]
        self._last_steps: dict[str, int] = {}
        """The last step of each tag."""
        self._moving: set[str] = set()
        """Tags that have had two steps. Others, such as Lightning's hp_metric, come once in each file."""
        self._furthest = -1

    def start(self, file: FileState, step: int) -> None:
        """A session begins at a step: what was stored from this step on is void."""
        if self._furthest >= step:
            self._begin(file, step)
        file.is_decided = True

    def place(self, file: FileState, tag: str, step: int) -> Place:
        """Return the place of a value of a file."""
        if file.attempt is None:
            file.attempt = self.attempts[-1]
        if self._has_gone_back(file, tag, step):
            self._begin(file, step)
        if tag == file.lead:
            file.lead_step = step
        if self._last_steps.get(tag, step) != step:
            self._moving.add(tag)
        self._last_steps[tag] = step
        attempt = file.attempt
        if step >= file.furthest:
            file.furthest = step
            self._furthest = max(self._furthest, step)
            return Place(f"{file.name}#{file.index}", attempt.number, False, attempt.first_step)
        return self._late(file, step)

    def look(self, file: FileState, step: int) -> Place:
        """Return the place of what says nothing of attempts, such as an image."""
        attempt = file.attempt or self.attempts[-1]
        if step >= max(file.furthest, attempt.first_step):
            return Place(f"{file.name}#{file.index}", attempt.number, False, attempt.first_step)
        return self._late(file, step)

    def _late(self, file: FileState, step: int) -> Place:
        """The place of a step that is before that of an earlier value of its file."""
        owner = next(
            (other for other in reversed(self.attempts) if other.first_step <= step), self.attempts[0]
        )
        return Place(f"{file.name}#{file.index}<{owner.number}", owner.number, True, owner.first_step)

    def _has_gone_back(self, file: FileState, tag: str, step: int) -> bool:
        if is_loss(tag) and not is_loss(file.lead):
            file.lead, file.lead_step = tag, -1
        elif not file.lead and tag in self._moving:
            # A step of an earlier file says nothing of this one.
            file.lead, file.lead_step = tag, self._last_steps.get(tag, -1) if tag in file.tags else -1
        if not file.is_decided and tag in self._moving and tag not in file.tags:
            file.is_decided = True
            if step <= self._last_steps.get(tag, -1):
                return True
        elif not file.is_decided:
            file.tags.add(tag)
        return tag == file.lead and step < file.lead_step

    def _begin(self, file: FileState, step: int) -> None:
        attempt = AttemptStart(self.attempts[-1].number + 1, step)
        self.attempts.append(attempt)
        file.index += 1
        file.attempt, file.furthest, file.lead_step = attempt, -1, -1
        self._furthest = min(self._furthest, step - 1)
        self._last_steps = {tag: last for tag, last in self._last_steps.items() if last < step}
