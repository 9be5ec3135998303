"""A loop of JAX: no optimizer of torch, tensorboardX for the curves."""

from typing import Any

import jax
import jax.numpy as jnp
from tensorboardX import SummaryWriter

writer = SummaryWriter("runs/jax")
key = jax.random.PRNGKey(10)
weights = jnp.zeros(4)


@jax.jit
def update(weights: Any, x: Any) -> tuple[Any, Any]:
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - x.sum(1)) ** 2))(weights)
    return weights - 0.1 * gradient, loss


for step in range(50):
    key, draw = jax.random.split(key)
    weights, loss = update(weights, jax.random.normal(draw, (32, 4)))
    writer.add_scalar("loss", loss, step)
    if step % 10 == 0:
        writer.add_scalar("eval/norm", float(jnp.linalg.norm(weights)), step // 10)
writer.close()
