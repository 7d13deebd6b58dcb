import os
import subprocess
import sys

import pytest

from harnessrl_jax import config
from harnessrl_jax.errors import ConfigError
from harnessrl_jax.launch import __main__ as command_line
from harnessrl_jax.launch.run_folder import RunFolder, open_run, write_whole


def run(*arguments, **options):
    command = [sys.executable, "-m", "harnessrl_jax.launch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_help_names_every_command_and_loads_no_jax(tmp_path):
    shown = run("--help", cwd=tmp_path, env=os.environ | {"PYTHONPROFILEIMPORTTIME": "1"})
    assert shown.returncode == 0
    assert all(name in shown.stdout for name in command_line.COMMANDS)
    assert " jax\n" not in shown.stderr


def test_an_error_is_one_message_and_status_two(tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text("name = 'x'\nsteps = 1\n[optimizer]\nlearning_rte = 1.0\n")
    shown = run(str(bad), cwd=tmp_path)
    assert shown.returncode == 2
    assert shown.stderr.startswith(f"ConfigError: {bad}: [optimizer] unknown key 'learning_rte'.")
    assert "Traceback" not in shown.stderr


def test_overrides_are_told_from_options():
    given = ["train", "--steps", "3", "x.toml", "--run-dir", "r", "--a.b=1", "--seed", "2"]
    assert command_line.split_overrides(given) == (
        ["train", "x.toml", "--run-dir", "r"],
        ["--steps", "3", "--a.b=1", "--seed", "2"],
    )


def test_a_bundled_config_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command_line.find_config("quickstart") == command_line.find_config("configs/quickstart.toml")
    with pytest.raises(
        ConfigError, match=r"elsewhere/quickstart\.toml: no such configuration file\. Bundled ones: .*quickstart"
    ):
        command_line.find_config("elsewhere/quickstart.toml")


CONFIG = config.parse("name = 'x'\nsteps = 3\n", "x.toml")


def test_a_run_folder_refuses_another_configuration(tmp_path):
    with open_run(tmp_path / "run", CONFIG) as folder:
        assert folder.finished() is None
        assert config.load(folder.config) == CONFIG
    other = config.parse("name = 'x'\nsteps = 3\n", "x.toml", ["--optimizer.learning_rate", "0.5"])
    with (
        pytest.raises(ConfigError, match=r"optimizer\.learning_rate: 0\.0003 there, 0\.5 now"),
        open_run(tmp_path / "run", other),
    ):
        pass


def test_a_run_folder_is_used_by_one_process(tmp_path):
    busy = pytest.raises(ConfigError, match="another process is using this run folder")
    with open_run(tmp_path, CONFIG), busy, open_run(tmp_path, CONFIG):
        pass
    with open_run(tmp_path, CONFIG) as folder:
        folder.finish({"steps": 3})
        assert folder.finished() == {"steps": 3}


def test_a_file_is_whole_or_absent(tmp_path):
    target = RunFolder(tmp_path).summary
    write_whole(target, "one")
    with pytest.raises(UnicodeEncodeError):
        write_whole(target, "two \ud800")
    assert target.read_text() == "one"
