"""What a compiled step finds around it."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from harnessrl_jax.launch.trainer import Trainer
from harnessrl_jax.training import TrainState, make_mesh
from harnessrl_jax.trajectories.rows import empty_batch


def test_a_step_is_compiled_with_its_mesh_in_context():
    mesh = make_mesh(data=2, fsdp=2, tensor=2, context=1)
    found = []

    @jax.jit
    def step(state, batch, rows_used):
        found.append(jax.sharding.get_abstract_mesh())
        return state, {"rows": rows_used}

    state = TrainState(params={}, opt_state=(), step=jnp.zeros((), jnp.int32), capo=())
    state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
    trainer = Trainer(step, mesh, shardings=state)
    for rows in (3, 4):
        state, numbers = trainer.run(state, empty_batch(row_slots=8, row_targets=4, rows=4), rows)
        assert numbers == {"rows": rows, "compilations": 1}
    assert found == [mesh.abstract_mesh]
