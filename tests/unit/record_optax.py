"""optax's own numbers, for tests that do without it.

pip install optax
python tests/unit/record_optax.py        # writes tests/unit/optax.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax_cases import (
    COUNTS,
    FACTORED,
    JOINED,
    MATRICES,
    SAME,
    SCHEDULES,
    STEPS,
    gradients,
    matrices,
    parameters,
)

jax.config.update("jax_enable_x64", True)


def arrays(numbers: dict[str, list[float]]) -> dict[str, Any]:
    return {name: jnp.asarray(x, dtype=jnp.float64) for name, x in numbers.items()}


def trained(tx: Any) -> dict[str, list[float]]:
    params = arrays(parameters())
    state = tx.init(params)
    for step in range(STEPS):
        updates, state = tx.update(arrays(gradients(step)), state, params)
        params = optax.apply_updates(params, updates)
    return {name: x.tolist() for name, x in params.items()}


def fast(tx: Any, period: int, part: float) -> dict[str, list[float]]:
    params = optax.LookaheadParams.init_synced(arrays(parameters()))
    tx = optax.lookahead(tx, period, part)
    state = tx.init(params)
    for step in range(STEPS):
        updates, state = tx.update(arrays(gradients(step)), state, params)
        params = optax.apply_updates(params, updates)
    return {name: x.tolist() for name, x in params.fast.items()}


def shaped(numbers: dict[str, list[float]]) -> dict[str, Any]:
    return {name: x.reshape(MATRICES[name]) for name, x in arrays(numbers).items()}


def factored(tx: Any) -> dict[str, list[float]]:
    params = shaped(matrices())
    state = tx.init(params)
    for step in range(STEPS):
        updates, state = tx.update(shaped(matrices(step)), state, params)
        params = optax.apply_updates(params, updates)
    return {name: x.ravel().tolist() for name, x in params.items()}


def factored_rms() -> Any:
    """optax's rate of decay is float32; here it is what it stands for."""
    return optax.scale_by_factored_rms(
        min_dim_size_to_factor=3,
        decay_rate_fn=lambda i, power: 1 - jnp.asarray(i + 1, jnp.float64) ** -power,
    )


def main() -> None:
    found: dict[str, Any] = {"optax": optax.__version__, "jax": jax.__version__}
    found["trained"] = {
        name: trained(getattr(optax, maker)(*args, **how))
        for name, (maker, args, how) in SAME.items()
    }
    found["trained"]["lookahead"] = fast(optax.adam(0.1), 3, 0.4)
    found["factored"] = {
        name: factored(getattr(optax, maker)(*args, **how))
        for name, (maker, args, how) in FACTORED.items()
    }
    found["factored"]["scale_by_factored_rms"] = factored(factored_rms())
    steps = optax.MultiSteps(optax.adam(0.1), 3, accumulator_dtype=jnp.float64)
    found["trained"]["MultiSteps"] = trained(steps)
    injected = optax.inject_hyperparams(optax.adam)(
        lambda count: 0.1 / (1 + jnp.asarray(count, dtype=jnp.float64)), b1=0.8
    )
    found["trained"]["inject_hyperparams"] = trained(injected)
    made = {
        name: getattr(optax, maker)(*args, **how)
        for name, ((maker, args, how), _) in SCHEDULES.items()
    }
    names, boundaries = JOINED
    made["join_schedules"] = optax.join_schedules([made[name] for name in names], boundaries)
    found["schedules"] = {
        name: [float(schedule(jnp.asarray(count))) for count in COUNTS]
        for name, schedule in made.items()
    }
    path = Path(__file__).with_name("optax.json")
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
