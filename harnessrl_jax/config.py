"""TOML text and `--section.key value` overrides -> one frozen Config.

The reader is strict: an unknown key, a wrong type or an impossible value is a ConfigError that names the place, what
was given and what was wanted. Units stand in the field names or beside them.
"""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic import Field

from harnessrl_jax.errors import ConfigError


class Section(pydantic.BaseModel):
    """A strict, frozen table of a configuration file."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Model(Section):
    """The decoder that is trained."""

    path: str = "builtin:quickstart"
    """A Hugging Face style folder (weights, config.json, tokenizer.json, chat_template.jinja), or `builtin:NAME`."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` takes only config.json and the tokenizer from the folder and draws the weights from the run's seed."""
    attention: Literal["dense", "blockwise", "pallas_tpu"] | None = None
    """What computes attention; absent, what suits the platform: kernels on TPUs, `blockwise` elsewhere."""
    remat: Literal["none", "dots", "attention", "full"] = "none"
    """What the backward pass computes again, for less memory and about a third more time: nothing, all but attention
    and projections, all but attention, or whole layers."""


_TOOL_CALL_FIELDS = {
    "json": {"name_key", "arguments_key", "other_keys", "served"},
    "delimited": {"open", "between", "close", "until", "end_closes", "line_start", "text_key", "served"},
    "tags": {"tags", "text_key", "served"},
}


class ToolCalls(Section):
    """How tool calls are written: which sampled tokens are action, which are arguments, and what a harness receives."""

    format: Literal[
        "template", "none", "hermes", "qwen3_coder", "glm4", "llama3", "mistral", "json", "react", "delimited", "tags"
    ] = "template"
    """`template`: as the model's chat template writes them, an error where that cannot be told. `none`: the model makes
    no calls. `react` is `Action:` and `Action Input:`, read by the harness. `json` is bare or fenced JSON; `delimited`
    (`open` NAME `between` ARGUMENTS `close`) and `tags` (a tag for each action) are for a harness's own format."""
    served: bool = False
    """`json`, `delimited`, `tags`: hand calls to the harness as tool calls. Otherwise it reads them in the text."""
    name_key: str = "name"
    """`json`: the key that holds the name."""
    arguments_key: str = "arguments"
    other_keys: tuple[str, ...] = ()
    """`json`: keys that may be there too."""
    open: str = ""
    """`delimited`: stands before the name."""
    between: str = ""
    """`delimited`: stands between name and arguments."""
    close: tuple[str, ...] = ()
    """`delimited`: any of these ends the arguments."""
    until: tuple[str, ...] = ()
    """`delimited`: any of these ends the arguments and begins something else."""
    end_closes: bool = False
    """`delimited`: the end of the output ends the arguments too."""
    line_start: bool = False
    """`delimited`: `open` counts only at the start of a line."""
    text_key: str = ""
    """Arguments are plain text; served, they are handed over under this key. Empty for `delimited`: they are JSON."""
    tags: tuple[tuple[str, str, str], ...] = ()
    """`tags`: [action, opening tag, closing tag], the last empty where the next tag ends the content."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "ToolCalls":
        used = {"format"} | _TOOL_CALL_FIELDS.get(self.format, set[str]())
        for name, field in type(self).model_fields.items():
            if name not in used and getattr(self, name) != field.default:
                raise ValueError(f"tool_calls.{name} has no meaning with format = {self.format!r}")
        return self


class Task(Section):
    """Where questions come from."""

    source: Literal["factbook", "jsonl", "tfds"] = "factbook"
    path: str | None = None
    """`jsonl`: a file of {"question", "answers"} lines. `tfds`: the data set's name, as in `trivia_qa/rc`."""
    heldout_path: str | None = None
    """`jsonl`: the questions kept for evaluation. `tfds`: the split kept for evaluation."""
    invented_countries: int = Field(default=0, ge=0)
    """`factbook`: add this many invented countries to the training corpus, so that names must be copied, not known."""

    invented_per_template: int = Field(default=400, ge=1)
    """`factbook`: questions of each template about the invented countries."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "Task":
        if (self.path is None) != (self.source == "factbook"):
            raise ValueError(f"task.path belongs to the sources jsonl and tfds; source is {self.source!r}")
        return self


class Harness(Section):
    """The agent program, run as separate processes."""

    command: tuple[str, ...] = ()
    """The program and its arguments; empty means the bundled multi-hop harness with its search index."""
    trainable_agents: tuple[str, ...] = ("central",)
    """Agents whose calls are trained. Central-only training names one; joint training names several."""
    workers: int = Field(default=2, ge=1)
    """Operating-system processes."""
    concurrency: int = Field(default=32, ge=1)
    """Rollouts at a time in one process."""
    deadline_s: float = Field(default=120.0, gt=0.0)
    """A rollout that takes longer is stopped and retried."""
    max_attempts: int = Field(default=2, ge=1)
    max_calls: int = Field(default=32, ge=1)
    """Model calls of one rollout; more are refused with 429."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Sampled tokens of one rollout; once they are used, calls are refused with 429."""
    max_concurrent_calls: int | None = Field(default=None, ge=1)
    """Requests of one rollout that are answered at the same time; further ones wait."""


class Behaviour(Section):
    """What answers the model calls."""

    kind: Literal["policy", "expert"] = "policy"
    """`policy` samples from the model; `expert` is the scripted, imperfect expert of the task."""
    temperature: float = Field(default=1.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)
    """0 keeps every token."""
    max_new_tokens: int = Field(default=48, ge=1)
    """Of one call; a smaller limit in the harness's request wins."""
    context_tokens: int = Field(default=512, ge=16)
    """Prompt and output of one call together."""
    slots: int = Field(default=64, ge=1)
    """Calls that are decoded together."""
    lanes: int = Field(default=1, ge=1)
    """Decoding states that the slots are split into. Several keep a processor's caches warm; an accelerator wants 1."""
    decode_steps: int = Field(default=4, ge=1)
    """Tokens sampled between two looks at the queue."""
    prefill_chunk_tokens: int = Field(default=64, ge=8)
    prefix_cache_chunks: int = Field(default=4096, ge=0)
    """Prompt chunks whose keys and values are kept between calls of one weights version."""


class Rollouts(Section):
    """How many rollouts an optimiser step collects."""

    groups: int = Field(default=8, ge=1)
    """Tasks per step."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts per task."""


class Credit(Section):
    """Rewards -> advantages and loss weights of sampled tokens."""

    baseline: Literal["leave_one_out", "group_mean", "group_std", "max_rl"] = "leave_one_out"
    """What is taken from the reward. `leave_one_out`: the mean of the other rollouts, as RLOO does. `group_mean`: the
    mean of all, as Dr.GRPO does. `group_std`: the same over the standard deviation, as GRPO does. `max_rl`: the same
    over the mean; rewards must be at least 0."""
    std_floor: float | None = Field(default=None, gt=0.0)
    """`group_std`: added to the standard deviation; 1e-6 is common."""
    std_unbiased: bool | None = None
    """`group_std`: divide the squares by n - 1, not by n."""
    compared: Literal["group", "harness", "agent"] = "group"
    """A rollout is compared with its whole group, with those of the same harness, or, agent by agent, with those in
    which the agent acted."""
    process_weight: float = Field(default=0.1, ge=0.0)
    """c_p in A = A_outcome + c_p A_process."""
    truncated: Literal["keep", "mask"] = "keep"
    """Rollouts cut off at a limit: `keep` trains them with their reward; `mask` only keeps it in the baseline."""
    flat_groups: Literal["keep", "drop"] = "keep"
    """Groups whose advantages are all 0: `keep` counts their tokens in the mean of the loss, `drop` does not."""
    mean: Literal["rollout", "token", "call", "prompt"] = "rollout"
    """`rollout`: mean over the tokens of a rollout, then over rollouts; likewise `call` and `prompt` (all rollouts of a
    task). `token`: one mean over all tokens."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "Credit":
        given = {"std_floor": self.std_floor, "std_unbiased": self.std_unbiased}
        wanted = self.baseline == "group_std"
        if wrong := [f"credit.{name}" for name, value in given.items() if (value is not None) != wanted]:
            raise ValueError(
                f"{' and '.join(wrong)} {'must be stated with' if wanted else 'belongs to'} credit.baseline = "
                f"'group_std'; baseline is {self.baseline!r}"
            )
        return self


class Policy(Section):
    """Policy gradient, plain or routed by role (CAPO)."""

    kind: Literal["policy"] = "policy"
    loss: Literal["clipped", "dual_clipped", "gspo", "cispo", "reinforce"] = "clipped"
    """`clipped` clips each token's ratio to the sampler, `gspo` one ratio for each call (and computes the batch once
    more to know it), `cispo` the ratio as a weight that leaves every token its gradient; `reinforce` has no clip."""
    clip_low: float = Field(default=0.2, ge=0.0, lt=1.0)
    clip_high: float = Field(default=0.28, ge=0.0)
    """The defaults suit a token's ratio; `gspo` wants both given, 3e-4 and 4e-4 in its paper."""
    dual_clip: float = Field(default=3.0, gt=1.0)
    """`dual_clipped`: the ratio above which a negative advantage costs no more."""
    importance: Literal["none", "truncated", "masked"] = "none"
    """`reinforce`: weight of each token for how the sampler's policy differs from the trainer's, cut off at
    `importance_limit`, or 0 outside [1 / `importance_limit`, `importance_limit`]."""
    importance_limit: float = Field(default=2.0, gt=1.0)
    routing: Literal["none", "vjp", "fused", "reference", "position_local"] = "vjp"
    """`none` is the plain gradient. `vjp`, `fused` and `reference` are equal forms of CAPO: `vjp` measures conflict,
    `fused` is faster and smaller, `reference` the definition. `position_local` is a cheap approximation."""
    score: Literal["contrast", "raw", "entropy", "random"] = "contrast"
    """`random` draws the units by the run's seed: a control for experiments, not a method."""
    top_fraction: float = Field(default=0.25, gt=0.0, le=1.0)
    """Units of a layer in each role's partition."""
    hysteresis: float = Field(default=1.1, ge=1.0)
    """A unit stays in a partition while it ranks in the top `hysteresis` x the partition's size."""
    statistic: Literal["relu", "up_relu", "abs", "fire"] = "relu"
    """What is averaged over a unit's activations."""
    include_gate: bool = True
    """Whether a unit owns its column of the gate projection too."""
    other_role: Literal["drop", "args", "ungated"] = "args"
    """What the tokens that are neither action nor arguments train."""
    ungated: Literal["frozen", "sum"] = "sum"
    """Parameters outside the MLP: frozen, or trained by the sum of both roles' gradients."""
    denominator: Literal["role", "shared"] = "role"
    """`role`: each role's loss is its own mean. `shared`: both are divided by the weight of all tokens."""
    shared: Literal["sum", "pcgrad", "cagrad", "drop_smaller"] = "sum"
    """How units of both partitions add the two gradients; all but `sum` need `routing = "vjp"`."""
    cagrad: float = Field(default=0.5, ge=0.0, lt=1.0)
    """c of `shared = "cagrad"`."""
    warmup: Literal["train", "probe"] = "train"
    """Steps before the first partition train every parameter, or none: their rollouts are then only probed."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps before the first partition, unless `warmup_rollouts` is reached earlier."""
    warmup_rollouts: int = Field(default=64, ge=1)
    """Probed successful rollouts after which warm-up may end."""
    refresh_steps: int = Field(default=20, ge=0)
    """Steps between two partitions; 0 keeps the first."""
    ema: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay per step of the activation statistics."""

    @pydantic.model_validator(mode="after")
    def _check_loss(self) -> "Policy":
        if self.importance != "none" and self.loss != "reinforce":
            raise ValueError(
                f"importance = {self.importance!r} needs loss = 'reinforce': {self.loss!r} takes its ratio to the "
                "sampler already, which would count twice"
            )
        if self.loss == "gspo" and not {"clip_low", "clip_high"} <= self.model_fields_set:
            raise ValueError(
                "loss = 'gspo' clips the mean ratio of a call, far closer to 1 than a token's: give clip_low and "
                "clip_high, 3e-4 and 4e-4 in its paper"
            )
        return self


class Supervised(Section):
    """Cross-entropy on captured rollouts of a scripted expert: the warm start."""

    kind: Literal["supervised"]
    rollouts: int = Field(ge=1)
    """Rollouts to collect before training."""
    keep_unsolved: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of the rollouts with verified reward below `solved_reward` that is kept."""
    solved_reward: float = Field(default=0.5, ge=0.0, le=1.0)
    rollouts_per_step: int = Field(default=16, ge=1)
    """Rollouts of one optimiser step; each is used once per epoch."""


class Optimizer(Section):
    """AdamW with linear warm-up, then constant or cosine decay to a tenth."""

    learning_rate: float = Field(default=3e-4, gt=0.0)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["constant", "cosine"] = "constant"
    b1: float = Field(default=0.9, ge=0.0, lt=1.0)
    b2: float = Field(default=0.98, ge=0.0, lt=1.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    clip_norm: float = Field(default=1.0, gt=0.0)


class Packing(Section):
    """The fixed shape of a training batch. A change recompiles."""

    row_slots: int = Field(default=1024, ge=32)
    """Tokens of one row."""
    row_targets: int = Field(default=512, ge=16)
    """Trained tokens of one row."""
    max_rows: int = Field(default=64, ge=1)
    micro_rows: int = Field(default=2, ge=1)
    """Rows whose activations are in memory together; a multiple of mesh.data x mesh.fsdp."""


class Mesh(Section):
    """Devices along each axis of the mesh. `data = 0` takes all that the other axes leave."""

    data: int = Field(default=0, ge=0)
    fsdp: int = Field(default=1, ge=1)
    tensor: int = Field(default=1, ge=1)
    context: int = Field(default=1, ge=1)
    cpu_devices: int = Field(default=2, ge=1)
    """Without an accelerator: virtual devices to split the processor into."""

    @property
    def rows(self) -> int:
        """Rows a micro-batch must hold a multiple of; `data = 0` is checked when the devices are known."""
        return max(1, self.data) * self.fsdp


class Evaluation(Section):
    """Held-out questions, asked before training and after it, sampled exactly as in training."""

    questions: int = Field(default=128, ge=0)
    every_steps: int = Field(default=0, ge=0)
    """0: only before and after."""
    shown: int = Field(default=3, ge=0)
    """Rollouts of the evaluation that the report shows, before and after."""


class Checkpoint(Section):
    """The whole run state, on disk."""

    every_steps: int = Field(default=5, ge=1)
    keep: int = Field(default=2, ge=1)


class Config(Section):
    """Everything a run depends on, apart from the code."""

    name: str
    steps: int = Field(ge=0)
    """Optimiser steps."""
    seed: int = Field(default=0, ge=0)
    model: Model = Model()
    tool_calls: ToolCalls = ToolCalls()
    task: Task = Task()
    harness: Harness = Harness()
    behaviour: Behaviour = Behaviour()
    rollouts: Rollouts = Rollouts()
    credit: Credit = Credit()
    algorithm: Policy | Supervised = Field(default=Policy(), discriminator="kind")
    optimizer: Optimizer = Optimizer()
    packing: Packing = Packing()
    mesh: Mesh = Mesh()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    about: str = ""
    """What to tell the user before the run."""
    expected_minutes: float = Field(default=0.0, ge=0.0)
    """How long the run took on the hardware its file names; 0 = nobody has measured it."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "Config":
        if self.algorithm.kind == "policy" and self.behaviour.kind == "expert":
            raise ValueError('an expert reports no log-probabilities: use [algorithm] kind = "supervised" with it')
        behaviour = self.behaviour
        if self.algorithm.kind == "policy" and (
            behaviour.temperature == 0 or behaviour.top_p < 1 or behaviour.top_k > 0
        ):
            raise ValueError(
                "policy gradients need the log-probabilities of the whole distribution: use behaviour.temperature "
                f"above 0, top_p = 1 and top_k = 0; got {behaviour.temperature}, {behaviour.top_p} and "
                f"{behaviour.top_k}"
            )
        if self.algorithm.kind == "supervised" and self.packing.row_slots < behaviour.context_tokens:
            raise ValueError(
                f"packing.row_slots = {self.packing.row_slots} must be at least behaviour.context_tokens = "
                f"{behaviour.context_tokens}, so that every captured call fits a row"
            )
        self._multiple("behaviour.slots", self.behaviour.slots, "behaviour.lanes", self.behaviour.lanes)
        self._multiple("packing.micro_rows", self.packing.micro_rows, "mesh.data x mesh.fsdp", self.mesh.rows)
        self._multiple("packing.max_rows", self.packing.max_rows, "packing.micro_rows", self.packing.micro_rows)
        return self

    @staticmethod
    def _multiple(name: str, value: int, of: str, unit: int) -> None:
        if value % unit:
            raise ValueError(f"{name} = {value} must be a multiple of {of} = {unit}")


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a TOML file and applies overrides such as `["--optimizer.learning_rate", "1e-3"]`.

    Raises:
      ConfigError: the file is missing, is not TOML, or a key or value cannot be used.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}). Give the path of a TOML file.") from error
    return parse(text, str(path), overrides)


def parse(text: str, where: str, overrides: Sequence[str] = ()) -> Config:
    """Parses TOML text; `where` names it in errors. Raises ConfigError."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not valid TOML: {error}.") from error
    for key, value in _pairs(overrides):
        _assign(values, key, value)
    try:
        return Config.model_validate(_tuples(values))
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(_explain(where, item) for item in error.errors())) from None


def _pairs(overrides: Sequence[str]) -> list[tuple[str, Any]]:
    """["--a.b", "1", "--c=2"] -> [("a.b", 1), ("c", 2)]."""
    pairs, items = [], list(overrides)
    while items:
        flag = items.pop(0)
        if not flag.startswith("--") or flag == "--":
            raise ConfigError(f"Override {flag!r}: expected --section.key VALUE.")
        key, equals, value = flag[2:].partition("=")
        if not equals:
            if not items:
                raise ConfigError(f"Override {flag}: a value is missing.")
            value = items.pop(0)
        pairs.append((key, _value(value)))
    return pairs


def _value(text: str) -> Any:
    """A TOML value where it is one, the plain text otherwise."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def _assign(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"Override --{key}: {section!r} is a value, not a section.")
    values[last] = value


def _tuples(value: Any) -> Any:
    """TOML arrays as tuples: a frozen configuration holds nothing mutable."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _explain(where: str, item: Mapping[str, Any]) -> str:
    # A discriminated union puts its tag into the location; users know only the section.
    path = [str(part) for part in item["loc"] if part not in ("policy", "supervised")]
    place = ".".join(path)
    if item["type"] == "extra_forbidden":
        known = sorted(_known(path[:-1]))
        near = difflib.get_close_matches(path[-1], known, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        section = f"[{'.'.join(path[:-1])}] " if path[:-1] else ""
        return f"{where}: {section}unknown key {path[-1]!r}.{hint}\n  Known keys: {', '.join(known)}."
    if item["type"] == "missing":
        return f"{where}: missing required key: {place}."
    message = item["msg"].removeprefix("Value error, ")
    given = "" if item["type"] == "value_error" else f", got {item['input']!r}"
    return f"{where}: {place + ': ' if place else ''}{message}{given}."


def _known(path: Sequence[str]) -> set[str]:
    fields: set[str] = set(Config.model_fields)
    for name in path:
        kinds = {"algorithm": (Policy, Supervised)}.get(name) or (type(Config.model_fields[name].default),)
        fields = {field for kind in kinds for field in kind.model_fields}
    return fields


def to_toml(config: Config) -> str:
    """The whole configuration, every default written out, as TOML that `parse` reads back to an equal Config."""
    values = config.model_dump(mode="json", exclude_none=True)
    lines = [f"{key} = {_literal(value)}" for key, value in values.items() if not isinstance(value, dict)]
    for section, table in values.items():
        if isinstance(table, dict):
            lines += ["", f"[{section}]", *(f"{key} = {_literal(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
        return f'"{escaped}"'
    return repr(value)
