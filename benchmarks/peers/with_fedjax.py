"""fedjax 0.0.17: federated averaging, or its APFL where METHOD is "apfl"."""

import os
import sys

from protocol import BATCH, ETA, serve, threads, work

os.environ["XLA_FLAGS"] = (
    f"--xla_cpu_multi_thread_eigen={'true' if threads() > 1 else 'false'} intra_op_parallelism_threads={threads()}"
)

import fedjax
import jax
import jax.numpy as jnp
from fedjax.algorithms import apfl, fed_avg

x, y, layers = work()
start = {f"layer{i}": {"w": jnp.asarray(w), "b": jnp.asarray(b)} for i, (w, b) in enumerate(layers)}


def loss(params, batch, rng):
    h = batch["x"]
    for i in range(len(params)):
        h = h @ params[f"layer{i}"]["w"] + params[f"layer{i}"]["b"]
        h = jax.nn.relu(h) if i < len(params) - 1 else h
    picked = jnp.take_along_axis(jax.nn.log_softmax(h), batch["y"][:, None], 1)
    return -picked.mean()


hparams = fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=1, skip_shuffle=True)
args = (jax.grad(loss), fedjax.optimizers.sgd(ETA), fedjax.optimizers.sgd(1.0), hparams)
if len(sys.argv) > 3 and sys.argv[3] == "apfl":
    algorithm = apfl.adaptive_personalized_federated_learning(*args, 0.5)
else:
    algorithm = fed_avg.federated_averaging(*args)
keys = jax.random.split(jax.random.PRNGKey(0), len(x))
clients = [(b"%d" % i, fedjax.ClientDataset({"x": x[i], "y": y[i]}), keys[i]) for i in range(len(x))]


def round_():
    state, _ = algorithm.apply(algorithm.init(start), clients)
    state = jax.block_until_ready(state.params)
    return [(state[f"layer{i}"]["w"], state[f"layer{i}"]["b"]) for i in range(len(state))]


serve(round_)
