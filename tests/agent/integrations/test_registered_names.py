"""`fp8scope` as the name of a logger, in scripts that do not import fp8scope: `fp8scope run` makes it one."""

from pathlib import Path

import pytest
from agent.helpers.launching import Launch, here
from agent.helpers.wire_server import WireServer
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from fp8scope.integrations.registered_names import NAME

__all__ = ["here"]

TRAINER = """
import json, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

class Counting(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        ids = (index + torch.arange(8)) % 32
        return {"input_ids": ids, "labels": ids}

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
)
arguments = TrainingArguments(
    "out", max_steps=4, per_device_train_batch_size=4, logging_steps=1, report_to=["fp8scope"],
    use_cpu=True, disable_tqdm=True, save_strategy="no",
)
trainer = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=Counting())
trainer.train()
json.dump([entry for entry in trainer.state.log_history if "loss" in entry], open("history.json", "w"))
"""

ACCELERATE = """
import torch
from accelerate import Accelerator
accelerator = Accelerator(log_with="fp8scope", cpu=True)
model = torch.nn.Linear(4, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.init_trackers("p", config={"lr": 0.1})
for step in range(4):
    loss = model(torch.ones(2, 4)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"train_loss": loss.item(), "constant": 1.0}, step=step)
accelerator.end_training()
"""

LITGPT = {
    "__init__": "",
    "types": "from typing import Literal\nLoggerChoice = Literal['csv', 'tensorboard']\n",
    "utils": """
from litgpt.types import LoggerChoice
def choose_logger(logger_name, out_dir, name, log_interval=1, **kwargs):
    if logger_name == "csv":
        return "theirs"
    raise ValueError(logger_name)
""",
    "pretrain": """
from typing import get_args
import torch
from lightning.fabric import Fabric
from litgpt.types import LoggerChoice
from litgpt.utils import choose_logger
assert get_args(LoggerChoice) == ("csv", "tensorboard", "fp8scope")
assert choose_logger("csv", "out", "name") == "theirs"
fabric = Fabric(accelerator="cpu", loggers=[choose_logger("fp8scope", "out", "name", log_interval=2)])
fabric.launch()
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(6):
    loss = model(torch.ones(2, 4)).square().mean()
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    fabric.log_dict({"train_loss": loss.item(), "iter": step}, step=step)
""",
}
"""Modules laid out like those of litgpt 0.5."""


def points(server: WireServer, name: str) -> list[tuple[int, float]]:
    rows = [(row["step"], row["scalars"].get(name)) for row in server.run.rows]
    return [(step, value) for step, value in rows if value is not None]


def test_it_works(server: WireServer, here: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`report_to=["fp8scope"]`: the trainer gets one callback, which begins one run with its options."""
    monkeypatch.delitem(integration_utils.INTEGRATION_TO_CALLBACK, NAME, raising=False)
    (tmp_path / "train.py").write_text(TRAINER)
    assert here("--name", "chosen", tmp_path / "train.py") == 0
    stored = server.run
    assert stored.registration["name"] == "chosen" and stored.steps == [1, 2, 3, 4]
    assert stored.finish["errors"] == 0 and len(points(server, "trainer/grad_norm")) == 4
    name_of_the_run = integration_utils.INTEGRATION_TO_CALLBACK[NAME]
    assert issubclass(name_of_the_run, TrainerCallback)
    assert vars(name_of_the_run).keys().isdisjoint({"on_train_begin", "on_log"})


def test_accelerate(server: WireServer, here: Launch, tmp_path: Path) -> None:
    """`accelerator.log` is captured, and given to the tracker: each value is recorded once."""
    (tmp_path / "loop.py").write_text(ACCELERATE)
    assert here(tmp_path / "loop.py") == 0
    stored = server.run
    assert stored.finish["errors"] == 0 and stored.steps == [1, 2, 3, 4]
    assert stored.scalars("train_loss") == stored.scalars("loss")
    assert stored.scalars("constant") == [1.0] * 4
    assert stored.scalars("tracker_step/accelerate") == [0.0, 1.0, 2.0, 3.0]
    assert stored.registration["config"]["lr"] == 0.1
    assert stored.registration["environment"]["capture"]["values"] == {"accelerate": 8}


def test_litgpt(server: WireServer, here: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command line takes the name, and Fabric gets fp8scope's logger."""
    package = tmp_path / "litgpt"
    package.mkdir()
    for name, text in LITGPT.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert here("-m", "litgpt.pretrain") == 0
    stored = server.run
    assert stored.finish["errors"] == 0 and sorted(set(stored.steps)) == [1, 2, 3, 4, 5, 6]
    assert points(server, "train_loss") == points(server, "loss")
    assert points(server, "tracker_step/lightning") == [(step, step - 1.0) for step in range(1, 7)]
