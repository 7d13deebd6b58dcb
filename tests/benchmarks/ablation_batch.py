"""Outputs of the two agents and their rewards -> a packed batch, one row a group."""

from typing import NamedTuple

import numpy as np

from harnessrl_jax.trajectories import PackedBatch, Role, leave_one_out


class Sampled(NamedTuple):
    """What one agent read and wrote; `rollouts` neighbours read the same prompt if it is the central agent."""

    prompt: np.ndarray  # [rollout, slot]
    output: np.ndarray  # [rollout, token]: action, colon, arguments, end
    logp: np.ndarray  # [rollout, token]


def packed(central: Sampled, worker: Sampled | None, reward: np.ndarray, rollouts: int) -> PackedBatch:
    """Each row holds the tree of a group's central calls, then the group's worker calls unless they are None."""
    size = central.output.shape[1]
    group = np.arange(len(reward)) // rollouts
    advantage = leave_one_out(reward.astype(np.float64), group, np.ones(len(group), bool))
    agents = [central] if worker is None else [central, worker]
    parts = [_trees(central, rollouts)]
    if worker is not None:
        parts.append(_sequences(worker, rollouts, first=parts[0][0].shape[1]))
    token, position, subtree_end, source = (np.concatenate(x, axis=1) for x in zip(*parts, strict=True))
    each = lambda name: np.concatenate([_rows(getattr(agent, name), rollouts) for agent in agents], axis=1)
    every_token = lambda x: np.tile(_rows(np.repeat(x[:, None], size, axis=1), rollouts), (1, len(agents)))
    rollout = every_token(np.arange(len(group)))
    agent = np.repeat(np.arange(len(agents)), rollouts * size)
    role = np.array([Role.ACTION, Role.OTHER, *[Role.ARGS] * (size - 3), Role.OTHER], np.int8)
    return PackedBatch(
        token=token,
        position=position,
        subtree_end=subtree_end,
        source=source,
        target=each("output").astype(np.int32),
        logp_behaviour=each("logp").astype(np.float32),
        has_logp=np.ones(source.shape, bool),
        advantage=every_token(advantage).astype(np.float32),
        role=np.broadcast_to(np.resize(role, source.shape[1]), source.shape),
        weight=np.ones(source.shape, np.float32),
        success=every_token(reward) > 0,
        call=(rollout * len(agents) + agent).astype(np.int32),
        rollout=rollout.astype(np.int32),
    )


def _rows(x: np.ndarray, rollouts: int) -> np.ndarray:
    """[rollout, token] -> [group, tokens of the group]"""
    return x.reshape(len(x) // rollouts, -1)


def _trees(calls: Sampled, rollouts: int) -> tuple[np.ndarray, ...]:
    """Token, position, end of subtree and source: the prompt once, then each output as a branch."""
    depth, size = calls.prompt.shape[1], calls.output.shape[1]
    token = np.concatenate([calls.prompt[::rollouts], _rows(calls.output, rollouts)], axis=1)
    start, steps = depth + size * np.arange(rollouts)[:, None], np.arange(size)[None]
    position = np.concatenate([np.arange(depth), np.tile(depth + steps[0], rollouts)])
    end = np.concatenate([np.full(depth, token.shape[1]), np.repeat(start[:, 0] + size, size)])
    source = np.where(steps == 0, depth - 1, start + steps - 1).ravel()
    return _repeated(token, position, end, source)


def _sequences(calls: Sampled, rollouts: int, first: int) -> tuple[np.ndarray, ...]:
    """The same for calls that share nothing, which are to lie in the slots from `first` on."""
    depth, size = calls.prompt.shape[1], calls.output.shape[1]
    token = _rows(np.concatenate([calls.prompt, calls.output], axis=1), rollouts)
    start = first + (depth + size) * np.arange(rollouts)[:, None]
    position = np.tile(np.arange(depth + size), rollouts)
    end = np.repeat(start[:, 0] + depth + size, depth + size)
    source = (start + depth - 1 + np.arange(size)[None]).ravel()
    return _repeated(token, position, end, source)


def _repeated(token: np.ndarray, *layout: np.ndarray) -> tuple[np.ndarray, ...]:
    """The layout is the same in every row."""
    return token.astype(np.int32), *(np.broadcast_to(x, (len(token), len(x))).astype(np.int32) for x in layout)
