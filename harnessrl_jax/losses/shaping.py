"""What rollouts achieved and what they cost -> one reward each."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from harnessrl_jax.errors import LossError


def cost_aware_reward(
    success: Bool[Array, " rollout"],
    calls: Int[Array, " rollout"],
    diversity: Float[Array, " rollout"],
    spam: Int[Array, " rollout"],
    invalid: Int[Array, " rollout"],
    *,
    success_reward: float,
    efficiency: float,
    max_calls: int,
    exploration: float | Float[Array, ""],
    spam_penalty: float,
    spam_limit: int,
    invalid_penalty: float,
) -> Float[Array, " rollout"]:
    """Reward of each rollout that pays for success, more for a short one, and charges for noise.

        R = S [success] + λ_eff (T_max - |τ|)/T_max [success] + λ_div D - c_spam min(spam, limit) - c_inv invalid

    An efficient failure earns nothing for its brevity. `diversity` is the one term that can be not finite; it is not
    read where `exploration` is 0.

    Args:
      success: whether the verifier accepted the result.
      calls: |τ|, actions of the rollout; beyond T_max they count as T_max.
      diversity: D, share of distinct actions or coverage of the memory calls, 0 to 1.
      spam: repeated actions without effect.
      invalid: actions that the environment refused.
      success_reward: S; 10 in the paper.
      efficiency: λ_eff; 1 in the paper.
      max_calls: T_max, at least 1; 50 in the paper.
      exploration: λ_div, from `exploration_weight`.
      spam_penalty: c_spam; 0.1 in the paper.
      spam_limit: most spam that is charged; 10 in the paper.
      invalid_penalty: c_inv; 0.1 in the paper.

    Raises:
      LossError: `max_calls` is below 1.

    References:
      EvoHarness-RL, https://arxiv.org/abs/2608.05446
    """
    if max_calls < 1:
        raise LossError(f"cost_aware_reward: max_calls must be at least 1, got {max_calls}.")
    saved = 1 - jnp.minimum(calls, max_calls) / max_calls
    solved = jnp.where(success, success_reward + efficiency * saved, 0)
    explored = jnp.where(exploration == 0, 0, exploration * diversity)
    return solved + explored - spam_penalty * jnp.minimum(spam, spam_limit) - invalid_penalty * invalid


def exploration_weight(update: Int[Array, ""], *, peak: float, updates: int) -> Float[Array, ""]:
    """λ_div at an update: half a cosine from `peak` at 0 down to 0 at `updates`, where it stays.

        λ(u) = peak (1 + cos(π min(u, U)/U)) / 2

    Args:
      update: optimiser updates done.
      peak: largest weight; 1 in the paper.
      updates: U, at least 1; 150 in the paper.

    Raises:
      LossError: `updates` is below 1.

    References:
      EvoHarness-RL, https://arxiv.org/abs/2608.05446
    """
    if updates < 1:
        raise LossError(f"exploration_weight: updates must be at least 1, got {updates}.")
    return peak * (1 + jnp.cos(jnp.pi * jnp.minimum(update, updates) / updates)) / 2


def overlong_penalty(tokens: Int[Array, " rollout"], *, max_tokens: int, grace_tokens: int) -> Float[Array, " rollout"]:
    """Soft penalty for length: 0 up to L_max - L_c, then falling linearly to -1 at L_max, and -1 beyond.

    Args:
      tokens: |y|, sampled tokens of each rollout.
      max_tokens: L_max; 20480 in the paper.
      grace_tokens: L_c, the stretch over which the penalty grows, from 1 to L_max; 4096 in the paper.

    Raises:
      LossError: `grace_tokens` is not between 1 and `max_tokens`.

    References:
      DAPO, eq. 13, https://arxiv.org/abs/2503.14476
    """
    if not 1 <= grace_tokens <= max_tokens:
        raise LossError(f"overlong_penalty: wanted 1 <= grace_tokens <= {max_tokens}, got {grace_tokens}.")
    return jnp.clip((max_tokens - grace_tokens - tokens) / grace_tokens, -1.0, 0.0)
