import contextlib
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from harnessrl_jax.checkpoints import Checkpoints
from harnessrl_jax.errors import CheckpointError


class State(NamedTuple):
    params: dict[str, jax.Array]
    opt_state: optax.OptState
    mask: jax.Array
    key: jax.Array
    step: jax.Array


def mesh(shape):
    return jax.make_mesh(shape, ("data", "fsdp"), axis_types=(AxisType.Auto, AxisType.Auto))


def shardings(state, mesh):
    spec = lambda leaf: PartitionSpec("fsdp") if leaf.shape == (8, 4) else PartitionSpec()
    return jax.tree.map(lambda leaf: NamedSharding(mesh, spec(leaf)), state)


def state_at(step, mesh):
    params = {"w": jnp.sin(jnp.arange(32.0)).reshape(8, 4) + step, "b": jnp.full(3, jnp.nan, jnp.bfloat16)}
    moments = optax.adamw(1e-3).init(params)
    state = State(params, moments, jnp.array([[True, False]]), jax.random.key(step), jnp.int32(step))
    return jax.device_put(state, shardings(state, mesh))


def like(state, mesh):
    place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.tree.map(place, state, shardings(state, mesh))


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_sharded_state_comes_back_bit_for_bit_on_another_mesh(tmp_path):
    saved, extra = state_at(7, mesh((4, 2))), {"position": {"epoch": 1, "next": 12}, "loss": 0.1, "digest": "a1"}
    with Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:
        checkpoints.save(7, saved, extra)
    with Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:
        assert checkpoints.latest() == 7
        target = like(saved, mesh((1, 8)))
        restored, extra_back = checkpoints.restore(7, target)
    assert_same(restored, saved)
    assert extra_back == extra
    assert restored.params["w"].sharding == target.params["w"].sharding
    assert len(restored.params["w"].sharding.device_set) == 8
    assert restored.params["w"].addressable_shards[0].data.shape == (1, 4)
    # The random stream goes on as if nothing had happened.
    assert jax.random.bits(restored.key) == jax.random.bits(saved.key)


def test_only_the_newest_are_kept(tmp_path):
    state = {"w": jnp.arange(3.0)}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest() is None
        for step in (1, 2, 5):
            checkpoints.save(step, state, {})
        assert checkpoints.steps() == (2, 5)
        with pytest.raises(CheckpointError, match=r"step 5: step 5 is already saved and steps must grow"):
            checkpoints.save(5, state, {})
        with pytest.raises(CheckpointError, match=r"step 1: there is no such checkpoint; complete ones: 2, 5"):
            checkpoints.restore(1, state)


KILLED = """
import os, signal, sys
from pathlib import Path
import jax, jax.numpy as jnp
from harnessrl_jax.checkpoints import Checkpoints

folder, event, part = sys.argv[1:]
checkpoints = Checkpoints(Path(folder), keep=1)
checkpoints.save(1, {"w": jnp.full(1000, 1.0)}, {"position": 10})

def die(name, arguments):
    if name == event and str(arguments[0]).endswith(part):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(die)
checkpoints.save(2, {"w": jnp.full(1000, 2.0)}, {"position": 20})
"""


MOMENTS = [
    ("open", "state.orbax-checkpoint-tmp/_METADATA"),  # arrays written, not described
    ("os.rename", "2.orbax-checkpoint-tmp"),  # everything written, not in its place
]


def test_kill_in_mid_save_leaves_the_previous_checkpoint(tmp_path):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    with contextlib.ExitStack() as stack:
        commands = [[sys.executable, "-c", KILLED, tmp_path / str(i), *moment] for i, moment in enumerate(MOMENTS)]
        start = lambda command: subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        for child in [stack.enter_context(start(command)) for command in commands]:
            _, errors = child.communicate(timeout=600)
            assert child.returncode == -signal.SIGKILL, errors
    for folder in (tmp_path / str(i) for i in range(len(MOMENTS))):
        with Checkpoints(folder, keep=1, read_only=True) as checkpoints:
            assert checkpoints.latest() == 1
            assert (folder / "2.orbax-checkpoint-tmp").is_dir()  # the run that owns it may still be at work
        with Checkpoints(folder, keep=1) as checkpoints:
            state, extra = checkpoints.restore(1, {"w": jnp.zeros(1000)})
            np.testing.assert_array_equal(state["w"], np.full(1000, 1.0))
            assert extra == {"position": 10}
            checkpoints.save(3, {"w": jnp.full(1000, 3.0)}, {"position": 30})
            assert checkpoints.steps() == (3,)
        assert sorted(os.listdir(folder)) == ["3", "harnessrl_checkpoints.json"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"w": jnp.zeros((4, 2)), "m": jnp.zeros(2)}, r"w: saved float32\[8, 2\], wanted float32\[4, 2\]"),
        ({"w": jnp.zeros((8, 2), jnp.bfloat16), "m": jnp.zeros(2)}, r"w: saved float32\[8, 2\], wanted bfloat16"),
        ({"w": jnp.zeros((8, 2))}, r"m: saved float32\[2\], not wanted"),
        (
            {"w": jnp.zeros((8, 2)), "m": jnp.zeros(2), "n": {"b": jnp.zeros(2)}},
            r"n/b: not in the checkpoint, wanted float32\[2\]",
        ),
    ],
)
def test_another_state_is_refused_leaf_by_leaf(tmp_path, wanted, message):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones((8, 2)), "m": jnp.ones(2)}, {})
        with pytest.raises(CheckpointError, match=rf"step 1: does not fit this run's state(.|\n)*{message}"):
            checkpoints.restore(1, wanted)


def test_a_folder_of_something_else_is_refused_and_untouched(tmp_path):
    (tmp_path / "3.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds files of something else \(3\.orbax-checkpoint-tmp, notes\.txt\)"):
        Checkpoints(tmp_path, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["3.orbax-checkpoint-tmp", "notes.txt"]


def test_folders_that_cannot_be_used_say_why(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no such folder; has this run saved anything yet\?"):
        Checkpoints(tmp_path / "none", keep=1, read_only=True)
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"file: is a file, a folder is wanted"):
        Checkpoints(tmp_path / "file", keep=1)
    with pytest.raises(CheckpointError, match=r"keep must be at least 1, got 0"):
        Checkpoints(tmp_path / "new", keep=0)
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "harnessrl_checkpoints.json").write_text('{"format": 2}')
    with pytest.raises(CheckpointError, match=r"json says '{\"format\": 2}', this version reads '{\"format\": 1}'"):
        Checkpoints(tmp_path / "newer", keep=1)


def test_damaged_files_say_which_step_and_what_to_do(tmp_path):
    message = r"step 4: cannot be read; the files are damaged; restore an older step"
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(4, {"w": jnp.ones(4)}, {})
        (tmp_path / "4" / "state" / "manifest.ocdbt").write_bytes(b"torn")
        with pytest.raises(CheckpointError, match=message):
            checkpoints.restore(4, {"w": jnp.ones(4)})
        (tmp_path / "4" / "record" / "metadata").write_text("{")
        with pytest.raises(CheckpointError, match=message):
            checkpoints.restore(4, {"w": jnp.ones(4)})


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"at": (1, 2)}, r"extra\['at'\] would come back as \[1, 2\], not \(1, 2\)"),
        ({"at": {1: 2}}, r"extra\['at'\] would come back as \{'1': 2\}"),
        ({"at": float("nan")}, r"`extra` must hold JSON values only"),
        ({"at": Path("x")}, r"`extra` must hold JSON values only"),
    ],
)
def test_extra_must_come_back_equal(tmp_path, extra, message):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        with pytest.raises(CheckpointError, match=message):
            checkpoints.save(1, {"w": jnp.ones(4)}, extra)
        assert checkpoints.latest() is None


def test_what_is_no_array_is_refused_by_name(tmp_path):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        with pytest.raises(CheckpointError, match=r"state leaf opt/count is int 3; every leaf must be an array"):
            checkpoints.save(1, {"opt": {"count": 3}}, {})
        checkpoints.save(1, {"w": np.ones(4)}, {})
        with pytest.raises(CheckpointError, match=r"says no sharding for w"):
            checkpoints.restore(1, {"w": np.ones(4)})
    reader = Checkpoints(tmp_path, keep=1, read_only=True)
    with reader, pytest.raises(CheckpointError, match=r"was opened read only"):
        reader.save(2, {"w": np.ones(4)}, {})


def test_an_application_that_logs_at_info_hears_nothing_from_orbax(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(4)}, {})
        checkpoints.restore(1, {"w": jnp.ones(4)})
    assert [record for record in caplog.records if "orbax" in record.pathname] == []
