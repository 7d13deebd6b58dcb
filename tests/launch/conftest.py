"""A tiny model folder, a task file and a harness of a user's own; the launcher as a real process."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import harnessrl_jax

HERE = pathlib.Path(__file__).parent
ASSETS = pathlib.Path(harnessrl_jax.__file__).parent / "assets" / "quickstart"
CONFIG = """
name = "game"
steps = {steps}

[model]
path = "{folder}/model"
init = "random"
attention = "dense"

[task]
source = "jsonl"
path = "{folder}/train.jsonl"
heldout_path = "{folder}/heldout.jsonl"

[harness]
command = ["{python}", "{harness}", "{folder}"]
trainable_agents = ["player"]
workers = 2
concurrency = 1
deadline_s = 15.0

[behaviour]
max_new_tokens = 8
context_tokens = 128
slots = 8

[rollouts]
groups = 2
group_size = 3

[algorithm]
kind = "policy"
other_role = "args"
warmup_steps = 1

[optimizer]
learning_rate = 1e-2

[packing]
row_slots = 128
row_targets = 64
max_rows = 16

[evaluation]
questions = 2
shown = 1

[checkpoint]
every_steps = 1
"""


class Game:
    """A folder with everything that a run needs, and the command that runs it."""

    def __init__(self, folder, questions=("one", "two", "three", "four"), steps=4, **changes):
        """`changes` are those of the model's `config.json`."""
        self.folder = folder
        model = folder / "model"
        model.mkdir()
        for name in ("tokenizer.json", "chat_template.jinja"):
            shutil.copyfile(ASSETS / name, model / name)
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
        settings = json.loads((ASSETS / "config.json").read_text()) | sizes | {"head_dim": 16, "intermediate_size": 64}
        (model / "config.json").write_text(json.dumps(settings | changes))
        for name, asked in (("train", questions), ("heldout", ("five", "six"))):
            lines = [json.dumps({"id": word, "question": f"Say {word}", "answers": ["red"]}) for word in asked]
            (folder / f"{name}.jsonl").write_text("\n".join(lines))
        values = {"folder": folder, "python": sys.executable, "harness": HERE / "word_game.py", "steps": steps}
        (folder / "game.toml").write_text(CONFIG.format(**values))

    def command(self, run, *more):
        return [
            sys.executable,
            "-m",
            "harnessrl_jax.launch",
            str(self.folder / "game.toml"),
            "--run-dir",
            str(run),
            *more,
        ]

    @property
    def environment(self):
        """Compiled steps are kept beside the runs: most of the time of a run this small is compilation."""
        cache = {"JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled")}
        return os.environ | cache | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    def start(self, run, *more):
        return subprocess.Popen(
            self.command(run, *more),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env=self.environment,
        )

    def finish(self, run, *more):
        done = subprocess.run(
            self.command(run, *more),
            capture_output=True,
            text=True,
            cwd=self.folder,
            timeout=600,
            env=self.environment,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done


@pytest.fixture(scope="session")
def make_game():
    """Game: `make_game(folder, questions=..., steps=...)`."""
    return Game
