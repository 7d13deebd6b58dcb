"""A training step of google-tunix's GRPO and of ours: the same model, parameters, calls and targets, in the same run.

tunix wants older packages than the rest, so this runs in an environment of its own:

    python -m venv .venv-tunix && . .venv-tunix/bin/activate && pip install -e '.[tunix]'
    python tests/benchmarks/against_tunix.py [SHAPE ...] [--repeats 3] [--shrink 4] [--rollouts 4]

tunix: its Qwen2, its `grpo_loss_fn` and the jitted step of its RL `Trainer`, unmodified and with their defaults, except
beta = 0 (ours has no reference model either). All calls are one batch, one sequence each: prompts padded on the left to
the longest prompt, outputs on the right to the longest output, as its learner pads them (which pads to configured
maxima, so this is the least it can pad). Attention is dense, which is what that model does on CPU.
Its packed sequences are no choice here: without its TPU kernel that model masks them by segment and not causally.

Ours: one row with the tree of all calls. Both use the same optimiser. CPU seconds, all threads, medians of interleaved
repeats, padding not corrected. The cosine of both gradients (AdamW's first moment after a step) says that they train
the same thing; it is 1 where all outputs have one length, as tunix's default is a mean per sequence.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from agent_shapes import SHAPES, Shape, group, shrunk
from flax import nnx, traverse_util
from training_step import ADAMW, ROUND, SMALL, compiled_step, cosine, layout, medians
from tunix.models.qwen2 import model as qwen2
from tunix.rl import algo_core, common
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.rl.trainer import Trainer
from tunix.sft.peft_trainer import TrainingConfig

from harnessrl_jax.models import init_params
from harnessrl_jax.training import make_optimizer
from harnessrl_jax.trajectories import CreditedCalls, group_trees

PAD = 0
NAMES = (
    ("embed/embedding", "embedder/input_embedding"),
    ("layers_", "layers/"),
    ("input_norm/scale", "input_layernorm/w"),
    ("post_norm/scale", "post_attention_layernorm/w"),
    ("final_norm/scale", "final_norm/w"),
    ("lm_head/kernel", "lm_head/w"),
    *((f"attn/{name}/kernel", f"attn/{name}_proj/w") for name in "qkvo"),
    *((f"attn/{name}/bias", f"attn/{name}_bias") for name in "qkv"),
    *((f"mlp/{name}/", f"mlp/{name}_proj/") for name in ("gate", "up", "down")),
)
"""Of our parameters and of tunix's, which hold the same numbers in the same order."""


def their_names(tree: Any) -> dict[str, np.ndarray]:
    """Our parameters or gradients under tunix's names."""
    named = {}
    for name, leaf in traverse_util.flatten_dict(tree, sep="/").items():
        for ours, theirs in NAMES:
            name = name.replace(ours, theirs)
        named[name] = np.asarray(leaf)
    return named


def their_model(params: Any) -> qwen2.Qwen2:
    """tunix's Qwen2 of our sizes, with our parameters."""
    config = qwen2.ModelConfig(
        num_layers=SMALL.layers,
        vocab_size=SMALL.vocab_size,
        embed_dim=SMALL.hidden_size,
        hidden_dim=SMALL.mlp_size,
        num_heads=SMALL.heads,
        head_dim=SMALL.head_dim,
        num_kv_heads=SMALL.kv_heads,
        rope_theta=int(SMALL.rope_theta),
        norm_eps=SMALL.rms_eps,
    )
    model = nnx.jit(lambda: qwen2.Qwen2(config, rngs=nnx.Rngs(0)))()
    state, ours = nnx.state(model, nnx.Param), their_names(params)
    theirs = traverse_util.flatten_dict(nnx.to_pure_dict(state))
    names = {path: "/".join(map(str, path)) for path in theirs}
    assert set(names.values()) == set(ours), set(names.values()) ^ set(ours)
    filled = {path: jnp.asarray(ours[names[path]]).reshape(leaf.shape) for path, leaf in theirs.items()}
    nnx.replace_by_pure_dict(state, traverse_util.unflatten_dict(filled))
    nnx.update(model, state)
    return model


def first_moment(opt_state: Any) -> Any:
    """AdamW's, after the clipping of `make_optimizer`."""
    return opt_state[1][0].mu


def their_batch(credited: CreditedCalls) -> common.TrainExample:
    """Each call a sequence: prompts end, and outputs start, in the same column."""
    calls = [item.call for item in credited.calls]
    prompts, outputs = [c.prompt_ids for c in calls], [c.output_ids for c in calls]
    prompt = np.full((len(calls), max(map(len, prompts))), PAD, np.int32)
    output = np.full((len(calls), max(map(len, outputs))), PAD, np.int32)
    logps = np.zeros(output.shape, np.float32)
    for row, call in enumerate(calls):
        prompt[row, -len(call.prompt_ids) :] = call.prompt_ids
        output[row, : len(call.output_ids)] = call.output_ids
        logps[row, : len(call.output_ids)] = call.logps
    return common.TrainExample(
        prompt_ids=jnp.asarray(prompt),
        prompt_mask=jnp.asarray(prompt != PAD),
        completion_ids=jnp.asarray(output),
        completion_mask=jnp.asarray(output != PAD, jnp.int32),
        advantages=jnp.asarray([item.advantage for item in credited.calls], jnp.float32),
        ref_per_token_logps=None,
        old_per_token_logps=jnp.asarray(logps),
    )


def their_trainer(params: Any) -> Trainer:
    """tunix's trainer of a policy, wired as its `GRPOLearner` wires it."""
    config = GRPOConfig(beta=0.0)
    config.temperature = 1.0  # its learner sets this from the rollouts' configuration
    config.epsilon_high = 0.28  # as ours
    training = TrainingConfig(eval_every_n_steps=10**6, max_steps=10**6)
    trainer = Trainer(their_model(params), make_optimizer(**ADAMW), training, custom_checkpoint_metadata_fn=dict)
    loss = lambda model, train_example, algo_config: algo_core.grpo_loss_fn(model, train_example, config, PAD, PAD)
    trainer.with_loss_fn(loss, has_aux=True)
    trainer.with_gen_model_input_fn(lambda example: {"train_example": example, "algo_config": config})
    return trainer


def measure(name: str, shape: Shape, repeats: int) -> None:
    """Prints what one shape's step costs in both."""
    credited = group(shape, SMALL.vocab_size)
    slots = sum(len(tree.token) for tree, _ in group_trees(credited, loss_mean="call", row_slots=10**6).items)
    ours = layout(SMALL, credited, -(-slots // ROUND) * ROUND)
    our_step = compiled_step(SMALL, ours.batch)
    trainer = their_trainer(jax.jit(init_params, static_argnums=0)(SMALL, jax.random.key(0)))
    batch, (step, _) = their_batch(credited), trainer.jit_train_and_eval_step()
    step(batch)  # compiles
    theirs = traverse_util.flatten_dict(nnx.to_pure_dict(first_moment(trainer.optimizer.opt_state)))
    same = cosine(
        their_names(first_moment(our_step()[0].opt_state)),
        {"/".join(map(str, path)): np.asarray(leaf) for path, leaf in theirs.items()},
    )
    taken = medians({"ours": our_step, "tunix": lambda: step(batch)}, repeats)
    padded = batch.prompt_ids.size + batch.completion_ids.size
    tokens = int((batch.prompt_ids != PAD).sum() + (batch.completion_ids != PAD).sum())
    print(f"\n{name}: {len(credited.calls)} calls, {int((ours.batch.weight > 0).sum())} targets, cosine {same:.6f}")
    print(f"  tunix  {tokens:6d} tokens in {padded:6d} slots  {taken['tunix']:7.2f} CPU seconds a step")
    print(
        f"  ours   {ours.tokens:6d} tokens in {ours.batch.token.size:6d} slots  {taken['ours']:7.2f} CPU seconds a step"
    )
    print(f"  tunix / ours  {taken['tunix'] / taken['ours']:.2f}", flush=True)


def main() -> None:
    """Reads the command line and measures each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shrink", type=int, default=4, help="every length divided by this")
    parser.add_argument("--rollouts", type=int, default=4)
    arguments = parser.parse_args()
    for name in arguments.shapes or ("appended turns", "thoughts left out"):
        shape = shrunk(SHAPES[name], arguments.shrink)._replace(rollouts=arguments.rollouts)
        measure(name, shape, arguments.repeats)


if __name__ == "__main__":
    main()
