"""The operations of a step are counted once with torch's formulas, without changing any result."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import fp8scope
from fp8scope.guard import Guard
from fp8scope.observe.timing import Measures
from fp8scope.observe.timing.flops import MAX_COUNTED, FlopModel, shapes_of
from fp8scope.observe.timing.peaks import BF16_PEAKS, bf16_peak
from fp8scope_kernels import MXFP8, CurrentScaling, convert, operands


class Attention(nn.Module):
    """One layer of attention over token ids, with a table and a head."""

    def __init__(self, tokens: int = 50, width: int = 32) -> None:
        super().__init__()
        self.table = nn.Embedding(tokens, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, tokens)
        self.calls = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        q, k, v = self.qkv(self.table(ids)).chunk(3, -1)
        mixed = functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)
        out: torch.Tensor = self.head(mixed[:, 0])
        return out


@pytest.fixture
def measures() -> Iterator[Measures]:
    guard = Guard()
    made = Measures(guard)
    yield made
    made.close()
    assert guard.errors == 0


def step_flops(measures: Measures, model: nn.Module, *args: Any, **kwargs: Any) -> float:
    """Return the operations counted in one step with this input."""
    measures.begin()
    model(*args, **kwargs).sum().backward()
    reading = measures.end({})
    assert reading is not None
    found = reading.read()
    seconds = sum(value for name, value in found.items() if name.startswith("time_"))
    return found.get("model_flops_per_second", 0.0) * seconds


def true_forward(model: nn.Module, *args: Any) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*args)
    return int(counter.get_total_flops())


def test_it_works(measures: Measures) -> None:
    model = Attention()
    ids = torch.randint(50, (4, 16))
    # Query, key, value and head; then the two products of attention, both by every pair of positions.
    forward = 2 * (4 * 16) * (32 * 96 + 32 * 50) + 2 * 2 * 4 * 16 * 16 * 32
    measures.watch(model)
    for _ in range(3):
        assert step_flops(measures, model, ids) == pytest.approx(3 * forward)


def test_counting_does_not_change_results(measures: Measures) -> None:
    torch.manual_seed(0)
    model, twin = Attention(), Attention()
    twin.load_state_dict(model.state_dict())
    measures.watch(model)
    ids = torch.randint(50, (2, 8))
    measures.begin()
    outputs = []
    for one in (model, twin):
        out = one(ids)
        out.square().sum().backward()
        outputs.append(out)
    assert torch.equal(outputs[0], outputs[1]) and (model.calls, twin.calls) == (1, 1)
    for mine, others in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None and others.grad is not None and torch.equal(mine.grad, others.grad)


def test_fp8_layers_count_like_the_layers_they_replace(measures: Measures) -> None:
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    x = torch.randn(8, 32)
    expected = 3 * true_forward(plain, x)
    fp8scope.convert(plain, fp8scope.DelayedScaling())
    measures.watch(plain)
    assert step_flops(measures, plain, x) == pytest.approx(expected)


def test_frozen_weights_count_no_weight_gradient(measures: Measures) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[0].requires_grad_(False)
    measures.watch(model)
    assert step_flops(measures, model, torch.randn(4, 16)) == pytest.approx(2.5 * 2 * 2 * 4 * 16 * 16)


def test_each_shape_is_counted_once_and_many_are_scaled(measures: Measures) -> None:
    model = nn.Linear(16, 16, bias=False)
    measures.watch(model)
    for rows in (*range(1, 2 * MAX_COUNTED), 5, 1):
        assert step_flops(measures, model, torch.randn(rows, 16)) == pytest.approx(3 * 2 * rows * 16 * 16)


def test_counts_keyword_inputs(measures: Measures) -> None:
    model = Attention()
    measures.watch(model)
    ids = torch.randint(50, (3, 8))
    assert step_flops(measures, model, ids) == pytest.approx(step_flops(measures, model, ids=ids))


def test_micro_batches_add_up(measures: Measures) -> None:
    model = nn.Linear(8, 8, bias=False)
    measures.watch(model)
    measures.begin()
    for _ in range(5):
        model(torch.ones(2, 8)).sum().backward()
    reading = measures.end({})
    assert reading is not None
    found = reading.read()
    seconds = sum(value for name, value in found.items() if name.startswith("time_"))
    assert found["model_flops_per_second"] * seconds == pytest.approx(5 * 3 * 2 * 2 * 8 * 8)


def test_an_evaluation_is_not_counted(measures: Measures) -> None:
    model = nn.Linear(8, 8)
    measures.watch(model)
    measures.begin()
    model.eval()
    model(torch.ones(2, 8))
    reading = measures.end({})
    assert reading is not None and "model_flops_per_second" not in reading.read()


def test_a_compiled_model_is_estimated_from_its_weights() -> None:
    model = Attention()
    model.compile(backend="eager")
    flops = FlopModel(model)
    ids = torch.zeros(4, 16, dtype=torch.int64)
    assert flops.begin(shapes_of((ids,), {})) is None
    # The table is looked up in, not multiplied.
    assert flops.step_flops(shapes_of((ids,), {}), (ids,), {}) == 3 * 2 * 64 * (32 * 96 + 32 * 50)


def test_a_head_that_shares_the_tables_weight_is_multiplied() -> None:
    model = Attention()
    model.head.weight = model.table.weight
    model.compile(backend="eager")
    ids = torch.zeros(1, 2, dtype=torch.int64)
    assert FlopModel(model).step_flops(shapes_of((ids,), {}), (ids,), {}) == 3 * 2 * 2 * (32 * 96 + 32 * 50)


def test_a_forward_pass_that_raises_while_it_is_counted(measures: Measures) -> None:
    model = nn.Linear(8, 8)
    measures.watch(model)
    measures.begin()
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 9))
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    assert _get_current_dispatch_mode() is None
    assert step_flops(measures, model, torch.ones(2, 8)) == pytest.approx(3 * 2 * 2 * 8 * 8)


class Inside(nn.Module):
    """Uses autocast in its own forward pass, where the caller does not see it."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.body = Attention()
        self.dtype = dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
            logits: torch.Tensor = self.body(ids)
        return logits.float()


@pytest.mark.parametrize(
    ("weights", "autocast", "precision"),
    [
        (torch.float32, None, "fp32"),
        (torch.float32, torch.bfloat16, "bf16"),
        (torch.float32, torch.float16, "fp16"),
        (torch.bfloat16, None, "bf16"),
        (torch.float64, None, ""),
    ],
)
def test_the_precision_is_that_of_the_products(
    measures: Measures, weights: torch.dtype, autocast: torch.dtype | None, precision: str
) -> None:
    model = Inside(autocast).to(weights)
    measures.watch(model)
    assert measures.precision == ""
    with torch.no_grad():
        model(torch.zeros(2, 4, dtype=torch.int64))
    assert measures.precision == ""
    step_flops(measures, model, torch.zeros(2, 4, dtype=torch.int64))
    assert measures.precision == precision


def test_layers_that_became_fp8_after_they_were_watched_are_fp8(measures: Measures) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    measures.watch(model)
    fp8scope.convert(model, fp8scope.CurrentScaling())
    step_flops(measures, model, torch.ones(4, 32))
    assert measures.precision == "fp8"


class Packed(torch.Tensor):
    """A tensor that looks like float32, as quantised weights of other libraries do."""

    content: torch.Tensor

    @staticmethod
    def __new__(cls, content: torch.Tensor) -> "Packed":
        packed: Packed = torch.Tensor._make_wrapper_subclass(cls, content.shape, dtype=torch.float32)
        packed.content = content
        return packed

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = [x.content.float() if isinstance(x, Packed) else x for x in args]
        out = func(*plain, **(kwargs or {}))
        return cls(out.half()) if func is torch.ops.aten.t.default else out


class PackedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(32))
        self.weight = Packed(torch.ones(32, 32, dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t() + self.bias


def test_a_tensor_of_another_library_does_not_tell_its_precision(measures: Measures) -> None:
    model = PackedLinear()
    measures.watch(model)
    assert step_flops(measures, model, torch.ones(4, 32)) > 0
    assert measures.precision == ""


@pytest.mark.parametrize(
    ("weights", "autocast", "precision"),
    [
        (torch.bfloat16, None, "bf16"),
        (torch.float32, torch.bfloat16, "bf16"),
        # There may be an autocast inside the graph, which nobody sees.
        (torch.float32, None, ""),
    ],
)
def test_a_compiled_models_precision_is_that_of_autocast_or_its_weights(
    measures: Measures, weights: torch.dtype, autocast: torch.dtype | None, precision: str
) -> None:
    model: nn.Module = torch.compile(Attention().to(weights), backend="eager")  # type: ignore[assignment]
    measures.watch(model)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        step_flops(measures, model, torch.zeros(2, 4, dtype=torch.int64))
    assert measures.precision == precision


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 366),
        ("NVIDIA L40", 181),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA H20", 148),
        ("NVIDIA A10G", 125),
    ],
)
def test_peak_of_known_devices(name: str, tera: float) -> None:
    assert bf16_peak(name) == pytest.approx(tera * 1e12)


def test_an_unknown_device_has_no_peak() -> None:
    assert bf16_peak("Tesla K80") is None and bf16_peak("") is None and bf16_peak("RTX 40900") is None
    assert all(1e13 < peak < 1e16 for _, peak in BF16_PEAKS)


def test_mfu_is_recorded_only_for_known_peaks(measures: Measures) -> None:
    model = nn.Linear(8, 8)
    measures.watch(model)
    found = []
    for peak in (None, 1e9):
        measures.begin()
        model(torch.ones(2, 8)).sum().backward()
        reading = measures.end({})
        assert reading is not None
        reading.peak = peak
        found.append(reading.read())
    assert "mfu" not in found[0] and found[0]["model_flops_per_second"] > 0
    assert found[1]["mfu"] == pytest.approx(found[1]["model_flops_per_second"] / 1e9)


def test_a_function_of_the_model_that_is_compiled_stays_compiled(measures: Measures) -> None:
    """torch gives up a function for good if it is called first while operations are counted."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    gated = torch.compile(lambda x: torch.relu(x) * torch.sigmoid(x), backend=backend)

    class Gated(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = gated(super().forward(x))
            return out

    model = Gated(8, 8)
    measures.watch(model)
    assert step_flops(measures, model, torch.ones(4, 8)) == pytest.approx(3 * 2 * 4 * 8 * 8)
    assert len(graphs) == 1


def test_convolutions_are_products_of_the_training(measures: Measures) -> None:
    """Their precision and channels are facts as those of linear layers; views are no operations."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, groups=16), nn.Flatten(), nn.Linear(64, 8)
    )
    measures.watch(model)
    with torch.autocast("cpu", torch.bfloat16):
        step_flops(measures, model, torch.ones(2, 3, 6, 6))
    facts = measures.facts()
    rows = {(row["layer"], row["precision"], row["in"], row["out"]) for row in facts["products"]}
    assert rows == {("0", "bf16", 3, 16), ("3", "bf16", 64, 8)}
    image = 2 * 2 * 4 * 4 * 16 * 3 * 9
    assert facts["convolutions"] == {"flops": image, "channels_first": image, "benchmark": False}
    assert facts["attention"]["of"] == true_forward(model, torch.ones(2, 3, 6, 6))
    # Three products, six conversions of weights and biases, and those of activations.
    assert 3 <= facts["operations"] <= 12


def test_products_on_fp8_units_are_counted_by_layer(
    measures: Measures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch multiplies FP8 operands on a CPU, too, but not with scales of blocks, as the second layer has."""
    monkeypatch.setattr(operands, "has_fp8_units", lambda device, kind: kind == "tensor")
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 4))
    convert(model, CurrentScaling(), include="0")
    convert(model, MXFP8(), include="1")
    measures.watch(model)
    assert "fp8_units" not in measures.facts()
    step_flops(measures, model, torch.ones(16, 16))
    # The input of the model needs no gradient.
    assert measures.facts()["fp8_units"] == {"products": 5, "on_units": 2, "other_layers": ["1"]}


@pytest.mark.parametrize("layers", (1, 2))
@pytest.mark.parametrize("bidirectional", (False, True))
@pytest.mark.parametrize("batch_first", (False, True))
def test_recurrent_layers_are_counted(
    measures: Measures, layers: int, bidirectional: bool, batch_first: bool
) -> None:
    """Fused ones too, of which torch has no formula: each row meets all matrices."""
    options: dict[str, Any] = {"bidirectional": bidirectional, "batch_first": batch_first}
    model = Recurrent(nn.LSTM(24, 32, layers, **options))
    measures.watch(model)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    for _ in range(2):
        flops = step_flops(measures, model, torch.randn(5, 7, 24, requires_grad=True))
        assert flops == pytest.approx(3 * 2 * 5 * 7 * matrices)


class Recurrent(nn.Module):
    def __init__(self, layer: nn.LSTM) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)[0]
        return out


def test_the_loader_is_that_whose_batches_are_trained_on(measures: Measures) -> None:
    """The loader of an evaluation does not count, even if it comes first, and batches may have none."""
    model = nn.Linear(4, 4)
    data: Any = list(torch.randn(40, 4))
    training, evaluation = DataLoader(data, batch_size=4, num_workers=1), DataLoader(data, batch_size=10)
    measures.watch(model)
    assert "loader" not in measures.facts()
    for _ in range(2):
        model.eval()
        with torch.no_grad():
            for batch in evaluation:
                model(batch)
        model.train()
        step_flops(measures, model, torch.randn(4, 4))
    assert "loader" not in measures.facts()
    with torch.no_grad():
        model(next(iter(evaluation)))
    for batch in training:
        step_flops(measures, model, batch)
    assert measures.facts()["loader"] == {"workers": 1, "pinned": False, "persistent": False}


class WrittenOut(nn.Module):
    """Attention by hand, with dropout of its matrix."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = functional.softmax(q @ k.mT / 8, -1)
        # As under autocast, which converts the matrix after its dropout.
        out: torch.Tensor = functional.dropout(scores, self.dropout).bfloat16() @ v.bfloat16()
        return out


@pytest.mark.parametrize("dropout", (0.0, 0.1))
def test_dropout_of_written_out_attention_is_a_fact(measures: Measures, dropout: float) -> None:
    model = WrittenOut(dropout)
    measures.watch(model)
    step_flops(measures, model, torch.randn(2, 64, 32))
    attention = measures.facts()["attention"]
    assert attention["written_out"] == 1 and attention["dropped_out"] == (dropout > 0)
