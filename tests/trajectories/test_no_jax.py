import subprocess
import sys

import pytest

CHECK = "import sys; assert not {'jax', 'flax', 'optax'} & set(sys.modules), 'imported'"


def run(code, **options):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize("module", ["", ".parsing", ".records"])
def test_trajectories_run_where_jax_is_absent(module):
    out = run(f"import harnessrl_jax.trajectories{module}; {CHECK}")
    assert (out.returncode, out.stderr) == (0, "")


def test_the_check_can_fail(tmp_path):
    (tmp_path / "jax.py").write_text("")  # stands in for JAX, which takes seconds to import
    out = run(f"import harnessrl_jax.trajectories; import jax; {CHECK}", cwd=tmp_path)
    assert out.returncode == 1
    assert "AssertionError: imported" in out.stderr
