"""A game with an action and an argument, and one step of it as the packed batch that a foreign trainer gets."""

from typing import NamedTuple

import jax
import numpy as np
import pytest

from harnessrl_jax.trajectories import (
    Call,
    LogpKind,
    PackedBatch,
    Role,
    Rollout,
    Span,
    build_lineage,
    call_advantages,
    pack_groups,
)

QUESTIONS, VOCAB, EACH = 4, 12, 16


class Game(NamedTuple):
    """Question q wants action 4 + q, then argument 8 + (q + 1) % 4."""

    questions: np.ndarray  # [16, 2]: every question followed by every action

    def reward(self, q, action, argument):
        return 0.5 * (action == 4 + q) + 0.5 * (argument == 8 + (q + 1) % 4)

    def expected_reward(self, logp):
        """logp [16, 2, vocab] after each token of `questions`."""
        p = np.exp(np.asarray(logp, np.float64)).reshape(QUESTIONS, 4, 2, VOCAB)
        right = [p[q, 0, 0, 4 + q] + (p[q, 0, 0, 4:8] * p[q, :, 1, 8 + (q + 1) % 4]).sum() for q in range(QUESTIONS)]
        return float(np.mean(right)) / 2

    def batch(self, logp, rng) -> PackedBatch:
        """`EACH` rollouts of every question, sampled among the four actions and the four arguments."""
        logp = np.asarray(logp, np.float64).reshape(QUESTIONS, 4, 2, VOCAB)
        calls, rollouts = [], []
        for number in range(QUESTIONS * EACH):
            q = number % QUESTIONS
            action = draw(rng, logp[q, 0, 0], range(4, 8))
            argument = draw(rng, logp[q, action - 4, 1], range(8, 12))
            said = [logp[q, 0, 0, action], logp[q, action - 4, 1, argument]]
            name = f"{number:03d}"
            calls.append(call(name, q, [action, argument], np.asarray(said, np.float32)))
            rollouts.append(rollout(name, q, self.reward(q, action, argument)))
        credited = call_advantages(rollouts, [build_lineage([each]) for each in calls], process_weight=0.0)
        step = pack_groups(credited, loss_mean="rollout", row_slots=48, row_targets=64, max_rows=2)
        assert not step.report.dropped
        return step.batch


def draw(rng, logp, among):
    p = np.exp(logp[list(among)])
    return int(rng.choice(list(among), p=p / p.sum()))


def call(name, q, output, logps):
    return Call(
        run_id="game",
        task_id=str(q),
        group_id=str(q),
        rollout_id=name,
        attempt=0,
        session_id="main",
        agent="central",
        trainable=True,
        parent_call_id=None,
        call_id=name,
        seq=0,
        choice=0,
        harness="game 1.0",
        dialect="openai-chat",
        prompt_ids=[q],
        output_ids=output,
        logps=logps,
        logp_kind=LogpKind(mode="raw", temperature=1.0, top_p=1.0, top_k=0),
        version_start=0,
        version_end=0,
        finish="stop",
        parse_status="none",
        tool_calls=(),
        spans=(Span(role=Role.ACTION, start=0, end=1), Span(role=Role.ARGS, start=1, end=2)),
        delivered=True,
        request_digest=name,
        retry=False,
        request="{}",
        started_s=0.0,
        finished_s=1.0,
    )


def rollout(name, q, reward):
    return Rollout(
        run_id="game",
        task_id=str(q),
        group_id=str(q),
        rollout_id=name,
        attempt=0,
        harness="game 1.0",
        status="completed",
        reward=reward,
        process_rewards={},
        answer=None,
        detail="",
        version=0,
        started_s=0.0,
        finished_s=1.0,
    )


@pytest.fixture(scope="session")
def game():
    pairs = [[q, action] for q in range(QUESTIONS) for action in range(4, 8)]
    return Game(np.asarray(pairs, np.int32))


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield
