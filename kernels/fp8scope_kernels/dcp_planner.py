"""A load planner for torch.distributed.checkpoint that reads older checkpoints.

    torch.distributed.checkpoint.load(state, checkpoint_id=folder, planner=ScalingLoadPlanner())

The package does not import this module, because it imports torch's distributed checkpoints.
"""

from dataclasses import replace

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan

from fp8scope_kernels.scaling_state import warn_older_form


class ScalingLoadPlanner(DefaultLoadPlanner):
    """torch's default planner, which also reads the number of calls of a delayed state from its extra state.

    Older checkpoints store it there; the default planner fails on them with `Missing key in checkpoint
    state_dict: ...scaling.<role>.calls`. A warning says if this was necessary. Current checkpoints are read
    as usual. Arguments are those of `DefaultLoadPlanner`.
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
        warn_older_form()
        # Plan as if the count were stored under its current name, then read it from the older one.
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
    """The older name of a state's count of calls; None for any other key."""
    path, _, name = key.rpartition(".")
    is_count = name == "calls" and path.rpartition(".")[0].endswith("scaling")
    return f"{path}._extra_state" if is_count else None
