"""Credit from a critic over the tokens of a step: by hand, whatever the packing, and known limits."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from harnessrl_jax.errors import PackingError, RecordError
from harnessrl_jax.trajectories import CreditedCall, build_lineage, call_parents, pack_groups, with_values

GAMMA, LAM = 0.9, 0.8
PROMPTS = {"a": [1, 2], "b": [1, 2, 3, 4, 9], "c": [1, 2, 3, 4, 8, 8], "d": [1, 2], "e": [1, 2, 6, 9, 9]}
OUTPUTS = {"a": [3, 4], "b": [5, 6, 3], "c": [7], "d": [6, 9], "e": [4, 4]}
ROLLOUT = {"a": "r", "b": "r", "c": "r", "d": "q", "e": "q"}  # b and c go on from a, e from d
OUTCOME, PROCESS = {"r": 1.0, "q": 0.25}, {"a": 0.0, "b": 0.5, "c": 0.0, "d": -0.25, "e": 0.0}


@pytest.fixture(scope="module")
def calls(make_call):
    make = lambda name, i: make_call(name, PROMPTS[name], OUTPUTS[name], rollout_id=ROLLOUT[name], seq=i)
    return {name: make(name, i) for i, name in enumerate(PROMPTS)}


def packed(calls, **shape):
    credited = type("Credited", (), {"calls": [CreditedCall(c, 0.0, True) for c in calls], "dropped": {}})
    return pack_groups(credited, loss_mean="token", **({"row_slots": 32, "row_targets": 16, "max_rows": 4} | shape))


def lineages(calls):
    return [build_lineage([c for c in calls if c.rollout_id == name]) for name in {c.rollout_id for c in calls}]


def value_of(name, i):
    return 0.1 * (ord(name) - 96) + 0.03 * i * i


def names(step):
    """The call's name and the place in its output of every target, in a batch of objects; None on padding."""
    out = np.full(step.batch.call.shape, None, object)
    for place in np.argwhere(step.batch.weight > 0):
        row, target = place
        name = step.calls[step.batch.call[row, target]].call.call_id
        out[row, target] = name, int(step.batch.position[row, step.batch.source[row, target]]) - len(PROMPTS[name]) + 1
    return out


def valued(calls, *, value=value_of, known=None, gamma=GAMMA, lam=LAM, **shape):
    """{(call, place in its output): (advantage, value, return)}, and the batch."""
    step = packed(calls, **shape)
    where = names(step)
    values = np.array([[np.nan if n is None else value(*n) for n in row] for row in where], np.float32)
    own = [item.call for item in step.calls]
    (batch,) = with_values(
        [step.batch],
        [values],
        parent=call_parents(step.calls, lineages(known or calls)),
        outcome=np.array([OUTCOME[c.rollout_id] for c in own]),
        process=np.array([PROCESS[c.call_id] for c in own]),
        gamma=gamma,
        lam=lam,
        children="equal",
    )
    fields = np.stack([batch.advantage, batch.value_behaviour, batch.target_return], -1)
    return {n: fields[i, j] for i, row in enumerate(where) for j, n in enumerate(row) if n}, batch


def by_hand():
    """GAE written out from the ends."""
    v, advantage = value_of, {}
    after = lambda reward, name, i: reward - v(name, i)
    step = lambda now, reward, then: (
        reward + GAMMA * np.mean([v(*t) for t in then]) - v(*now) + GAMMA * LAM * np.mean([advantage[t] for t in then])
    )
    advantage["b", 2], advantage["c", 0] = after(0.5 + 1.0, "b", 2), after(1.0, "c", 0)
    advantage["e", 1] = after(0.25, "e", 1)
    advantage["b", 1] = step(("b", 1), 0, [("b", 2)])
    advantage["b", 0] = step(("b", 0), 0, [("b", 1)])
    advantage["a", 1] = step(("a", 1), 0, [("b", 0), ("c", 0)])
    advantage["a", 0] = step(("a", 0), 0, [("a", 1)])
    advantage["e", 0] = step(("e", 0), 0, [("e", 1)])
    advantage["d", 1] = step(("d", 1), -0.25, [("e", 0)])
    advantage["d", 0] = step(("d", 0), 0, [("d", 1)])
    return {n: (a, v(*n), a + v(*n)) for n, a in advantage.items()}


@pytest.mark.parametrize("shape", [{}, {"row_slots": 7, "row_targets": 4, "max_rows": 12}])
def test_by_hand_in_one_row_and_in_many(calls, shape):
    got, batch = valued(list(calls.values()), **shape)
    want = by_hand()
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6, err_msg=str(name))
    assert ((batch.weight > 0).any(axis=1).sum() > 1) == bool(shape)
    for field in (batch.advantage, batch.value_behaviour, batch.target_return):
        assert field.dtype == np.float32
        np.testing.assert_array_equal(field[batch.weight == 0], 0)


def test_batches_of_one_step_are_read_together(calls):
    step = packed(list(calls.values()), row_slots=7, row_targets=4, max_rows=12)
    values = np.random.default_rng(0).normal(size=step.batch.weight.shape).astype(np.float32)
    number = len(step.calls)
    how = {"parent": call_parents(step.calls, lineages(calls.values())), "gamma": GAMMA, "lam": LAM}
    how |= {"outcome": np.ones(number), "process": np.zeros(number), "children": "by_leaves"}
    (whole,) = with_values([step.batch], [values], **how)
    cut = lambda part: step.batch._make(field if isinstance(field, tuple) else field[part] for field in step.batch)
    later, former = with_values([cut(slice(1, 12)), cut(slice(1))], [values[1:], values[:1]], **how)
    for name in ("advantage", "value_behaviour", "target_return"):
        np.testing.assert_array_equal(
            np.concatenate([getattr(former, name), getattr(later, name)]), getattr(whole, name)
        )


@hypothesis.settings(max_examples=25)
@hypothesis.given(st.permutations(sorted(PROMPTS)), st.sampled_from([0.0, 0.3, 1.0]))
def test_the_order_of_the_calls_changes_nothing(calls, order, lam):
    got, _ = valued([calls[name] for name in order], lam=lam)
    want, _ = valued(list(calls.values()), lam=lam)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


def test_without_a_critic_returns_are_monte_carlo(calls):
    got, _ = valued(list(calls.values()), value=lambda name, i: 0.0, gamma=1.0, lam=1.0)
    want = {"a": 1.25, "b": 1.5, "c": 1.0, "d": 0.0, "e": 0.25}
    for (name, _), (advantage, _, target) in got.items():
        assert advantage == target == want[name]


def test_a_call_that_is_not_trained_is_passed_over(calls, make_call):
    """d goes on to e through f, which is in no batch."""
    f = make_call("f", [1, 2, 6, 9], [9], rollout_id="q", seq=9)
    known = [*calls.values(), f]
    step = packed(list(calls.values()))
    parent = call_parents(step.calls, lineages(known))
    number = {item.call.call_id: i for i, item in enumerate(step.calls)}
    assert {name: int(parent[i]) for name, i in number.items()} == {
        "a": -1, "b": number["a"], "c": number["a"], "d": -1, "e": number["d"],
    }  # fmt: skip
    np.testing.assert_array_equal(
        valued(list(calls.values()), known=known)[1].advantage, valued(calls.values())[1].advantage
    )
    rest = [call for name, call in calls.items() if name != "a"]
    got, _ = valued(rest, known=list(calls.values()))
    np.testing.assert_allclose(got["b", 2], by_hand()["b", 2], rtol=1e-5)


def test_neither_the_numbers_of_the_calls_nor_calls_in_no_batch_matter(calls, make_call):
    """d, f and e go on from each other; then f has no targets; then the numbers run backwards."""
    known = [calls["d"], make_call("f", [1, 2, 6, 9], [9], rollout_id="q", seq=9), calls["e"]]
    step = packed(known)
    values = np.random.default_rng(0).normal(size=step.batch.weight.shape).astype(np.float32)
    number = {item.call.call_id: i for i, item in enumerate(step.calls)}
    how = {"outcome": np.arange(3.0), "process": np.zeros(3), "gamma": GAMMA, "lam": LAM, "children": "equal"}
    parent = np.full(3, -1)
    parent[number["f"]], parent[number["e"]] = number["d"], number["f"]
    batch = step.batch._replace(weight=np.where(step.batch.call == number["f"], 0, step.batch.weight))
    (got,) = with_values([batch], [values], parent=parent, **how)
    straight = np.where(parent == number["f"], number["d"], parent)
    (want,) = with_values([batch], [values], parent=straight, **how)
    np.testing.assert_array_equal(got.advantage, want.advantage)
    backwards = batch._replace(call=np.where(batch.call >= 0, 2 - batch.call, -1))
    turned = np.where(parent[::-1] == -1, -1, 2 - parent[::-1])
    (got,) = with_values([backwards], [values], parent=turned, **(how | {"outcome": np.arange(3.0)[::-1]}))
    np.testing.assert_array_equal(got.advantage, want.advantage)
    (apart,) = with_values([batch], [values], parent=np.full(3, -1), **how)
    assert (apart.advantage != want.advantage).any()


def test_misuse_is_refused(calls):
    step = packed(list(calls.values()), row_slots=7, row_targets=4, max_rows=12)
    values, n = np.zeros(step.batch.weight.shape, np.float32), len(step.calls)
    how = {"parent": np.full(n, -1), "outcome": np.ones(n), "process": np.zeros(n), "gamma": 1.0, "lam": 1.0}
    run = lambda batch=step.batch, values=values, **changes: with_values(
        [batch], [values], **(how | {"children": "equal"} | changes)
    )
    with pytest.raises(PackingError, match=r"values is \[\(12, 3\)\], wanted one array for each batch: \[\(12, 4\)\]"):
        run(values=values[:, :3])
    with pytest.raises(PackingError, match=r"outcome is \[4\], wanted one entry a call as parent: \[5\]"):
        run(outcome=np.ones(4))
    with pytest.raises(PackingError, match="a target is of call 4, but parent names 4"):
        run(**{name: how[name][:4] for name in ("parent", "outcome", "process")})
    with pytest.raises(PackingError, match="parent must be -1 or a call below 5, got -1 to 5"):
        run(parent=np.array([-1, -1, 5, -1, -1]))
    with pytest.raises(PackingError, match="go on from each other in a circle"):
        run(parent=np.array([1, 0, -1, -1, -1]))
    b = next(i for i, item in enumerate(step.calls) if item.call.call_id == "b")
    middle = (step.batch.call == b) & (np.take_along_axis(step.batch.position, step.batch.source, 1) == 5)
    with pytest.raises(PackingError, match=rf"call {b} has no target, or more than one, between depths 4 and 6"):
        run(step.batch._replace(weight=np.where(middle, 0, step.batch.weight)))
    with pytest.raises(RecordError, match="tree_gae: values"):
        run(values=np.where(step.batch.weight > 0, np.inf, 0).astype(np.float32))
