"""JAX: a byte model of Flax, recorded by fp8scope without torch.

    pip install . jax flax optax
    python examples/jax_loop.py [STEPS]

A step has its loss, gradient norm, learning rate and tokens, and the amax of each parameter and of its
gradient. They are copied from the device once a step.
"""

import sys
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fp8scope

WIDTH, CONTEXT, BATCH = 64, 32, 16
RATE = 1e-2


class NextByte(nn.Module):
    """Predicts the next byte from the mean of those before it."""

    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        hidden = nn.Embed(256, WIDTH)(text)
        hidden = jnp.cumsum(hidden, axis=1) / jnp.arange(1, text.shape[1] + 1)[:, None]
        for _ in range(2):
            hidden = hidden + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(hidden))))
        logits: jax.Array = nn.Dense(256)(hidden)
        return logits


def batches(seed: int) -> Iterator[np.ndarray]:
    """Yield pieces of this file as bytes, integers [BATCH, CONTEXT + 1]."""
    with open(__file__, "rb") as file:
        text = np.frombuffer(file.read(), np.uint8).astype(np.int32)
    draw = np.random.default_rng(seed)
    while True:
        starts = draw.integers(0, len(text) - CONTEXT - 1, BATCH)
        yield np.stack([text[start : start + CONTEXT + 1] for start in starts])


def amaxes(tree: Any, kind: str) -> dict[str, jax.Array]:
    """Return the largest magnitude of each tensor of a tree, by its path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        f"amax/{'.'.join(str(part.key) for part in path)}.{kind}": jnp.abs(leaf).max()
        for path, leaf in leaves
    }


def main(steps: int, seed: int = 0) -> None:
    """Train for some steps."""
    model, optimizer = NextByte(), optax.adamw(RATE)
    data = batches(seed)
    parameters = model.init(jax.random.PRNGKey(seed), next(data)[:, :-1])["params"]
    state = optimizer.init(parameters)

    @jax.jit
    def update(parameters: Any, state: Any, text: jax.Array) -> tuple[Any, Any, dict[str, jax.Array]]:
        def loss_of(parameters: Any) -> jax.Array:
            logits = model.apply({"params": parameters}, text[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

        loss, gradients = jax.value_and_grad(loss_of)(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        values = {"loss": loss, "grad_norm": optax.global_norm(gradients)}
        values |= amaxes(parameters, "weight") | amaxes(gradients, "grad_weight")
        return optax.apply_updates(parameters, updates), state, values

    # On several hosts, do this where `jax.process_index()` is 0.
    run = fp8scope.init(
        name="jax byte model",
        config={"width": WIDTH, "batch": BATCH, "learning_rate": RATE, "devices": jax.device_count()},
        seed=seed,
        total_steps=steps,
        precision="fp32",
    )
    for _ in range(steps):
        with run.step(tokens=BATCH * CONTEXT) as step:
            parameters, state, values = update(parameters, state, next(data))
            step.log(learning_rate=RATE)
            # One copy for all values, when the update is done.
            step.log(jax.device_get(values))
    run.finish()
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
