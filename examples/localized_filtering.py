"""Train a small byte-level GPT with localized filtering attention and block-wise cross-entropy, in FP8.

    python examples/localized_filtering.py
    python examples/localized_filtering.py --precision bf16 --attention basic --rows 16

Both are of the Yuan 2.0 report (arXiv 2311.15786). Localized filtering lets each query and key see its two
predecessors before attention does. Block-wise cross-entropy computes the logits of some tokens at a time and
reduces them at once, so that the largest tensor of the last stage is rows x vocabulary instead of tokens x
vocabulary.
"""

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8scope
from fp8scope.demo.data import load
from fp8scope.demo.model import Attention, ByteGpt, Shape

BATCH = 16


class CausalConvolution(nn.Module):
    """A convolution over each token and the one before it, as a linear layer on their pair.

    As `nn.Conv1d` it would compute the same, but `convert` makes FP8 layers of `nn.Linear`.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.pair = nn.Linear(2 * inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, inputs] -> [batch, time, outputs]; before the first token there are zeros."""
        before = functional.pad(x[:, :-1], (0, 0, 1, 0))
        y: Tensor = self.pair(torch.cat((before, x), -1))
        return y


class LocalizedFilter(nn.Module):
    """Two causal convolutions, to half the width and back, added to their input and normalised."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.narrow = CausalConvolution(width, width // 2)
        self.widen = CausalConvolution(width // 2, width)
        self.norm = nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same; an output depends on its token and the two before it."""
        y: Tensor = self.norm(x + self.widen(self.narrow(x)))
        return y


class FilteredAttention(Attention):
    """The demo's causal self-attention, with filtered inputs of queries and keys. Values are not filtered."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        del self.qkv
        self.filter = LocalizedFilter(shape.width)
        self.qk = nn.Linear(shape.width, 2 * shape.width)
        self.v = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same."""
        batch, time, width = x.shape
        q, k = self.qk(self.filter(x)).view(batch, time, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        v = self.v(x).view(batch, time, self.heads, -1).transpose(1, 2)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        weights = scores.masked_fill(self.future[:time, :time], -torch.inf).softmax(-1).to(v.dtype)
        mixed: Tensor = self.out((weights @ v).transpose(1, 2).reshape(batch, time, width))
        return mixed


class _BlockCrossEntropy(torch.autograd.Function):
    """Computes the gradients of the mean loss together with it, block by block, in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, ignored: int) -> Tensor:
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if for_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if for_weight else None
        counted = (targets != ignored).to(wide)
        share = counted / counted.sum()
        for start in range(0, len(hidden), rows):
            x, target = hidden[start : start + rows], targets[start : start + rows, None]
            part = share[start : start + rows, None]
            # What is ignored needs some column; its share is 0.
            target = target.where(part > 0, 0)
            logits = (x @ weight.t()).to(wide)
            norm = logits.logsumexp(-1, keepdim=True)
            total += ((norm - logits.gather(-1, target)) * part).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            # From logits to their gradient in the same memory: (softmax - one-hot) * share.
            gradient = logits.sub_(norm).exp_().scatter_add_(-1, target, -torch.ones_like(norm)).mul_(part)
            narrow = gradient.to(x.dtype)
            if grad_hidden is not None:
                grad_hidden[start : start + rows] = narrow @ weight
            if grad_weight is not None:
                grad_weight += narrow.t() @ x
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            None if grad_hidden is None else grad_hidden * grad.to(grad_hidden.dtype),
            None if grad_weight is None else grad_weight * grad.to(grad_weight.dtype),
            None,
            None,
            None,
        )


def block_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, rows: int, ignore_index: int = -100
) -> Tensor:
    """The mean cross-entropy of `hidden @ weight.t()` in nats, float32 without dimensions.

    `hidden`: [tokens, width]. `weight`: [vocabulary, width], of the output head. `targets`: int64 [tokens];
    those that equal `ignore_index` do not count. At most `rows` tokens have logits at a time. The gradient is
    that of the whole, not an estimate; it is computed once, in the forward pass.
    """
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}.")
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden, weight = (x.to(torch.get_autocast_dtype(kind)) for x in (hidden, weight))
    arguments = hidden, weight.to(hidden.dtype), targets, rows, ignore_index
    loss: Tensor = _BlockCrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]
    return loss


class FilteredGpt(ByteGpt):
    """The demo's GPT, which returns the mean loss of a text. The output head's weight is used in blocks."""

    def __init__(self, shape: Shape, *, filtered: bool, rows: int) -> None:
        super().__init__(shape)
        self.rows = rows
        if filtered:
            for block in self.blocks:
                block.attention = FilteredAttention(shape)

    def forward(self, text: Tensor) -> Tensor:
        """int64 [batch, time + 1] -> the loss, float32 without dimensions."""
        inputs, targets = text[:, :-1], text[:, 1:]
        x = self.bytes(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        hidden = self.norm(x).flatten(0, 1)
        return block_cross_entropy(hidden, self.head.weight, targets.flatten(), rows=self.rows)


def main() -> None:
    """Train and finish the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="fp8")
    parser.add_argument("--attention", choices=("lfa", "basic"), default="lfa")
    parser.add_argument("--rows", type=int, default=64, help="tokens whose logits are computed at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    shape = Shape()
    model = FilteredGpt(shape, filtered=options.attention == "lfa", rows=options.rows)
    corpus = load(shape.context, windows=1)
    if options.precision == "fp8":
        # The filters' convolutions become FP8 layers like all others. The head keeps its precision.
        print(fp8scope.convert(model, fp8scope.DelayedScaling()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run = fp8scope.init(
        name=f"{options.attention} {options.precision} seed {options.seed}",
        precision=options.precision,
        group=f"{options.attention} {options.precision}",
        seed=options.seed,
        total_steps=options.steps,
        config={"shape": shape, "batch": BATCH, "attention": options.attention, "rows": options.rows},
    )
    run.watch(model, optimizer)
    for number in range(1, options.steps + 1):
        with run.step(tokens=BATCH * shape.context) as step:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(corpus.batch(number, BATCH))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step.log(loss=loss)
        if number % 50 == 0:
            print(f"step {number}: loss {loss.item():.3f}  {run.url}")
    run.finish()


if __name__ == "__main__":
    main()
