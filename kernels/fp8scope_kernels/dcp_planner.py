"""Older checkpoints through torch.distributed.checkpoint, which reads only what it finds under the same name.

    torch.distributed.checkpoint.load(state, checkpoint_id=folder, planner=ScalingLoadPlanner())

Not imported by the package itself, because it imports torch's distributed checkpoints.
"""

from dataclasses import replace

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan

from fp8scope_kernels.scaling_state import tell_older_form


class ScalingLoadPlanner(DefaultLoadPlanner):
    """Torch's own planner, which also finds the number of calls of a delayed scaling state as extra state.

    That is how checkpoints had it once; torch's planner says `Missing key in checkpoint state_dict:
    ...scaling.<role>.calls` of them. One warning tells when any was read so. Checkpoints in the present form
    are read as ever. Arguments are those of `DefaultLoadPlanner`.
    """

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        older = {
            key: name
            for key in self.state_dict
            if key not in saved and (name := _older_name(key)) is not None and name in saved
        }
        if not older:
            return super().create_local_plan()
        tell_older_form()
        # The plan is made as if the count had its present name, and then reads where it is.
        renamed = saved | {key: saved[name] for key, name in older.items()}
        self.metadata = replace(self.metadata, state_dict_metadata=renamed)
        plan = super().create_local_plan()
        items = [
            replace(item, storage_index=replace(item.storage_index, fqn=older[item.storage_index.fqn]))
            if item.storage_index.fqn in older
            else item
            for item in plan.items
        ]
        return replace(plan, items=items)


def _older_name(key: str) -> str | None:
    """What the count of calls was called in older checkpoints; None for anything that is none."""
    path, _, name = key.rpartition(".")
    is_count = name == "calls" and path.rpartition(".")[0].endswith("scaling")
    return f"{path}._extra_state" if is_count else None
