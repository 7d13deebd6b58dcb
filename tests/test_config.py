import pathlib

import pydantic
import pytest

from harnessrl_jax import config
from harnessrl_jax.errors import ConfigError

MINIMAL = "name = 'x'\nsteps = 3\n"
CONFIGS = sorted(pathlib.Path(__file__).parents[1].glob("configs/*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_committed_config_is_read_and_opens_with_its_command(path):
    assert config.load(path).name == path.stem
    assert "python -m harnessrl_jax.launch" in path.read_text().split("\n\n")[0]


def test_the_resolved_text_reads_back_to_an_equal_config():
    given = config.parse(
        MINIMAL, "x.toml", ["--harness.trainable_agents", '["central", "a \\"b\\""]', "--about=two\nlines"]
    )
    assert given.harness.trainable_agents == ("central", 'a "b"')
    assert config.parse(config.to_toml(given), "resolved.toml") == given


def test_overrides_win_over_the_file_and_keep_their_types():
    given = config.parse(MINIMAL, "x.toml", ["--steps", "7", "--optimizer.learning_rate=1e-3", "--name", "other"])
    assert (given.steps, given.optimizer.learning_rate, given.name) == (7, 1e-3, "other")


def test_a_standard_deviation_says_which_one_it_is():
    text = MINIMAL + "[credit]\nbaseline = 'group_std'\nstd_floor = 1e-6\nstd_unbiased = false"
    given = config.parse(text, "x.toml")
    assert (given.credit.std_floor, given.credit.std_unbiased) == (1e-6, False)
    assert config.parse(config.to_toml(given), "resolved.toml") == given


def test_a_config_cannot_be_changed():
    with pytest.raises(pydantic.ValidationError):
        config.parse(MINIMAL, "x.toml").steps = 4  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[optimizer]\nlearning_rte = 1.0",
            r"f\.toml: \[optimizer\] unknown key 'learning_rte'\. Did you mean 'learning_rate'\?",
        ),
        ("sedd = 1", r"f\.toml: unknown key 'sedd'\. Did you mean 'seed'\?\n  Known keys: about, algorithm"),
        (
            "[algorithm]\nkind = 'policy'\nclip_lo = 1.0",
            r"\[algorithm\] unknown key 'clip_lo'\. Did you mean 'clip_low'",
        ),
        ("seed = '3'", r"f\.toml: seed: Input should be a valid integer, got '3'\."),
        ("[algorithm]\nclip_low = 1.5\nkind = 'policy'", r"algorithm\.clip_low: Input should be less than 1, got 1\.5"),
        (
            "[algorithm]\nkind = 'supervised'\nrollouts = 1\n[packing]\nrow_slots = 64\n"
            "[behaviour]\ncontext_tokens = 65",
            r"packing\.row_slots = 64 must be at least behaviour\.context_tokens = 65",
        ),
        ("[algorithm]\nloss = 'gspo'\nclip_low = 3e-4\nkind = 'policy'", r"give clip_low and clip_high, 3e-4 and 4e-4"),
        (
            "[algorithm]\nimportance = 'truncated'\nkind = 'policy'",
            r"algorithm: importance = 'truncated' needs loss = 'reinforce': .* would count twice",
        ),
        ("[packing]\nmax_rows = 5", r"packing\.max_rows = 5 must be a multiple of packing\.micro_rows = 2"),
        ("[behaviour]\nkind = 'expert'", r"an expert reports no log-probabilities"),
        ("[behaviour]\ntop_p = 0.9", r"policy gradients need .* top_p = 1 and top_k = 0; got 1\.0, 0\.9 and 0"),
        (
            "[credit]\nbaseline = 'loo'",
            r"credit\.baseline: Input should be 'leave_one_out', 'group_mean', 'group_std' or",
        ),
        (
            "[credit]\nbaseline = 'group_std'\nstd_floor = 1e-6",
            r"credit\.std_unbiased must be stated with credit\.baseline",
        ),
        ("[credit]\nstd_floor = 1e-6", r"credit\.std_floor belongs to .*'group_std'; baseline is 'leave_one_out'"),
        ("[credit]\nbaseline = 'group_std'\nstd_floor = 0.0", r"credit\.std_floor: Input should be greater than 0"),
        ("[task]\nsource = 'jsonl'", r"task\.path belongs to the sources jsonl and tfds"),
        ("x = ", r"f\.toml: not valid TOML"),
    ],
)
def test_a_bad_file_says_what_and_where(text, message):
    with pytest.raises(ConfigError, match=message):
        config.parse(MINIMAL + text, "f.toml")


def test_missing_keys_and_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"missing required key: name"):
        config.parse("steps = 1", "f.toml")
    with pytest.raises(ConfigError, match=r"nothing\.toml: cannot be read \(No such file"):
        config.load(tmp_path / "nothing.toml")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["steps", "3"], r"Override 'steps': expected --section\.key VALUE"),
        (["--steps"], r"Override --steps: a value is missing"),
        (["--steps.x", "3"], r"Override --steps\.x: 'steps' is a value, not a section"),
    ],
)
def test_a_bad_override_is_explained(overrides, message):
    with pytest.raises(ConfigError, match=message):
        config.parse(MINIMAL, "f.toml", overrides)


VLLM = "[sampler]\nkind = 'vllm'\nurl = 'http://engine:8000'\nmodel = 'tiny'\n"


def test_the_engine_is_chosen_on_the_command_line():
    assert config.parse(MINIMAL, "x.toml").sampler == config.InProcess()
    given = config.parse(MINIMAL, "x.toml", ["--sampler", "sglang", "--sampler.url", "https://engine"])
    assert given.sampler == config.SGLangServer(kind="sglang", url="https://engine")
    assert config.parse(config.to_toml(given), "resolved.toml") == given
    moved = config.parse(MINIMAL + VLLM, "x.toml", ["--sampler.url=http://other:1"]).sampler
    assert moved == config.VLLMServer(kind="vllm", url="http://other:1", model="tiny")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[sampler]\nurl = 'http://a'",
            r"f\.toml: \[sampler\] does not say which it is\. Give sampler\.kind: in_process",
        ),
        ("[sampler]\nkind = 'vlm'", r"f\.toml: sampler: Input tag 'vlm' .* 'jetstream', 'vllm', 'sglang'"),
        ("[sampler]\nkind = 'vllm'\nurl = 'http://a'", r"f\.toml: missing required key: sampler\.model\."),
        (VLLM + "modle = 'x'", r"\[sampler\] unknown key 'modle'\. Did you mean 'model'\?"),
        ("[sampler]\nkind = 'in_process'\nurl = 'http://a'", r"\[sampler\] unknown key 'url'\.\n  Known keys: kind\."),
        (
            "[sampler]\nkind = 'sglang'\nurl = 'engine:8000'",
            r"sampler: url = 'engine:8000' is not of the form 'http://H",
        ),
        ("[sampler]\nkind = 'sglang'\nurl = 'http://a/v1'", r"is not of the form 'http://HOST:PORT', without a path"),
        ("[sampler]\nkind = 'jetstream'\naddress = 'tpu-2:9000'", r"'tpu-2:9000' is not 'localhost:PORT': .* a tunnel"),
        (
            VLLM + "logprobs = 'raw'\n[behaviour]\ntemperature = 0.5",
            r"log-probabilities at behaviour\.temperature = 0\.5",
        ),
    ],
)
def test_an_engine_that_cannot_be_used_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        config.parse(MINIMAL + text, "f.toml")
