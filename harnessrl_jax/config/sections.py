"""The tables of a configuration, but for those that come in several kinds."""

from typing import Literal

import pydantic
from pydantic import Field

from harnessrl_jax.config.section import Section


class Model(Section):
    """The decoder that is trained."""

    path: str = "builtin:quickstart"
    """A Hugging Face style folder (weights, config.json, tokenizer.json, chat_template.jinja), or `builtin:NAME`."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` takes only config.json and the tokenizer from the folder and draws the weights from the run's seed."""
    attention: Literal["dense", "blockwise", "pallas_tpu", "pallas_gpu"] | None = None
    """What computes attention; absent, what suits the platform: kernels on TPUs and Hopper GPUs, `blockwise`
    elsewhere."""
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
    prefill_rows: int = Field(default=1, ge=1)
    """Prompt chunks that one prefill call reads, of one prompt or of several; missing ones are padded, at full cost."""
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
