"""A training step in PyTorch and of ours: the same model, parameters, calls and targets, in the same run.

    python -m venv .venv-torch && . .venv-torch/bin/activate && pip install -e . 'transformers>=5' 'trl>=1.16'
    python tests/benchmarks/against_torch.py [SHAPE ...] [--repeats 3] [--shrink 4] [--rollouts 4]

PyTorch: `transformers`' Qwen2 with scaled-dot-product attention, eager, float32, clipped loss, AdamW, logits of the
outputs only. Each call is a sequence of its own, in three ways:

    TRL         its `GRPOTrainer`'s loss on one batch of all calls, with beta = 0, backward, and the optimiser below
    padded      the same batch in plain PyTorch: prompts padded on the left, outputs on the right, a mask of the padding
    one by one  each call alone, so that nothing is padded or masked and attention is causal; gradients add up

Ours: one row with the tree of all calls. CPU seconds, all threads, medians of interleaved repeats, padding not
corrected. The cosine of both gradients (AdamW's first moment after a step) says that they train the same thing; it is 1
where all rollouts sample as many tokens.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # PyTorch's threads sleep while they wait: waiting is no work
import datasets
import jax
import numpy as np
import safetensors.numpy
import tokenizers
import torch
import transformers
import trl
from agent_shapes import SHAPES, Shape, group, shrunk
from training_step import ADAMW, ROUND, SMALL, compiled_step, cosine, layout, medians

from harnessrl_jax.models import init_params
from harnessrl_jax.trajectories import CreditedCalls, group_trees
from harnessrl_jax.weights import save_model

PAD = 0
CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # as `compiled_step`
Batch = dict[str, torch.Tensor]


def their_model(params: Any) -> transformers.PreTrainedModel:
    """transformers' model with our parameters, through the folder that we write."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, SMALL, params)
        return transformers.Qwen2ForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)


def their_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW as `make_optimizer` has it: only matrices decay."""
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": ADAMW["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=ADAMW["learning_rate"], betas=(ADAMW["b1"], ADAMW["b2"]), eps=ADAMW["eps"])


def their_batch(credited: CreditedCalls) -> Batch:
    """Each call a sequence: prompts end, and outputs start, in the same column; under TRL's names."""
    calls = [item.call for item in credited.calls]
    longest = [max(len(ids) for ids in each) for each in zip(*((c.prompt_ids, c.output_ids) for c in calls))]
    prompt, output = (np.full((len(calls), size), PAD, np.int64) for size in longest)
    logps = np.zeros(output.shape, np.float32)
    for row, call in enumerate(calls):
        prompt[row, -len(call.prompt_ids) :] = call.prompt_ids
        output[row, : len(call.output_ids)] = call.output_ids
        logps[row, : len(call.output_ids)] = call.logps
    return {
        "prompt_ids": torch.from_numpy(prompt),
        "prompt_mask": torch.from_numpy((prompt != PAD).astype(np.int64)),
        "completion_ids": torch.from_numpy(output),
        "completion_mask": torch.from_numpy((output != PAD).astype(np.int64)),
        "advantages": torch.tensor([item.advantage for item in credited.calls], dtype=torch.float32),
        "old_per_token_logps": torch.from_numpy(logps),
    }


def alone(batch: Batch) -> Iterator[Batch]:
    """Each call without its padding."""
    for row in range(len(batch["prompt_ids"])):
        one = {name: value[row : row + 1] for name, value in batch.items()}
        prompt, output = one["prompt_mask"][0] > 0, one["completion_mask"][0] > 0
        yield {
            name: value if value.ndim < 2 else value[:, prompt if name.startswith("prompt") else output]
            for name, value in one.items()
        }


def clipped_loss(model: transformers.PreTrainedModel, batch: Batch, *, masked: bool) -> torch.Tensor:
    """Summed clipped loss of a batch."""
    tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1) if masked else None
    outputs = batch["completion_ids"]
    logits = model(input_ids=tokens, attention_mask=mask, logits_to_keep=outputs.shape[1] + 1, use_cache=False).logits
    scores = logits[:, :-1]
    logps = scores.gather(-1, outputs[..., None])[..., 0] - torch.logsumexp(scores, -1)
    ratio = torch.exp(logps - batch["old_per_token_logps"])
    advantage = batch["advantages"][:, None]
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage)
    return -(gain * batch["completion_mask"]).sum()


def their_step(model: torch.nn.Module, backward: Callable[[Any], None]) -> tuple[Any, Callable[[], Any]]:
    """The model's optimiser, and a step: `backward` leaves gradients, which are clipped and applied."""
    optimizer = their_optimizer(model)

    def step() -> int:
        backward(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), ADAMW["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
        return 0  # something to wait for

    return optimizer, step


def padded(batch: Batch) -> Callable[[Any], None]:
    """All calls at once."""
    count = int(batch["completion_mask"].sum())
    return lambda model: (clipped_loss(model, batch, masked=True) / count).backward()


def one_by_one(batch: Batch) -> Callable[[Any], None]:
    """A call after the other."""
    calls, count = list(alone(batch)), int(batch["completion_mask"].sum())

    def backward(model: Any) -> None:
        for call in calls:
            (clipped_loss(model, call, masked=False) / count).backward()

    return backward


def with_trl(params: Any, batch: Batch) -> tuple[Any, Callable[[Any], None]]:
    """TRL's model and its loss of the same batch; the trainer is made for them, and neither samples nor steps."""
    words = {"<pad>": PAD} | {str(i): i for i in range(1, SMALL.vocab_size)}
    whole = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    named = {"pad_token": "<pad>", "eos_token": "1", "unk_token": "<pad>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=whole, **named)
    folder = Path(tempfile.mkdtemp())
    config = trl.GRPOConfig(
        output_dir=str(folder), beta=0.0, epsilon=CLIP_LOW, epsilon_high=CLIP_HIGH, use_cpu=True, bf16=False,
        num_generations=2, per_device_train_batch_size=2, report_to="none", temperature=1.0, loss_type="bnpo",
        activation_checkpointing=False, max_steps=1,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=their_model(params),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["1", "2"]}),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    inputs = batch | {"num_items_in_batch": batch["completion_mask"].sum()}
    return trainer.model, lambda model: trainer._compute_loss(model, inputs).backward()


def first_moments(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """AdamW's, by the parameter's name."""
    return {name: optimizer.state[p]["exp_avg"].numpy().copy() for name, p in model.named_parameters()}


def our_first_moments(opt_state: Any) -> dict[str, np.ndarray]:
    """Ours under the same names: written and read as a model would be."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, SMALL, opt_state[1][0].mu)
        return safetensors.numpy.load_file(Path(folder) / "model.safetensors")


def measure(name: str, shape: Shape, repeats: int) -> None:
    """Prints what one shape's step costs in each way."""
    credited = group(shape, SMALL.vocab_size)
    slots = sum(len(tree.token) for tree, _ in group_trees(credited, loss_mean="rollout", row_slots=10**6).items)
    ours = layout(SMALL, credited, -(-slots // ROUND) * ROUND)
    works: dict[str, Callable[[], Any]] = {"ours": compiled_step(SMALL, ours.batch)}
    gradient = our_first_moments(works["ours"]()[0].opt_state)
    params, batch = jax.jit(init_params, static_argnums=0)(SMALL, jax.random.key(0)), their_batch(credited)
    ways = {
        "TRL": with_trl(params, batch),
        "padded": (their_model(params), padded(batch)),
        "one by one": (their_model(params), one_by_one(batch)),
    }
    same = {}
    for way, (model, backward) in ways.items():
        optimizer, works[way] = their_step(model, backward)
        works[way]()
        same[way] = cosine(gradient, first_moments(model, optimizer))
    taken = medians(works, repeats)
    tokens = int(batch["prompt_mask"].sum() + batch["completion_mask"].sum())
    padded_slots = batch["prompt_ids"].numel() + batch["completion_ids"].numel()
    print(f"\n{name}: {len(credited.calls)} calls, {int((ours.batch.weight > 0).sum())} targets, {tokens} tokens")
    print(
        f"  ours        {ours.tokens:6d} tokens in {ours.batch.token.size:6d} slots  {taken['ours']:7.2f} CPU seconds"
    )
    for way, cos in same.items():
        where = f"{tokens:6d} tokens in {tokens if way == 'one by one' else padded_slots:6d} slots"
        ratio = taken[way] / taken["ours"]
        print(
            f"  {way:10s}  {where}  {taken[way]:7.2f} CPU seconds, {ratio:5.2f} times ours, cosine {cos:.6f}",
            flush=True,
        )


def main() -> None:
    """Reads the command line and measures each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shrink", type=int, default=4, help="every length divided by this")
    parser.add_argument("--rollouts", type=int, default=4)
    arguments = parser.parse_args()
    for name in arguments.shapes or ("appended turns",):
        shape = shrunk(SHAPES[name], arguments.shrink)._replace(rollouts=arguments.rollouts)
        measure(name, shape, arguments.repeats)


if __name__ == "__main__":
    main()
