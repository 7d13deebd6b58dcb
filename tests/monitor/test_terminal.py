import dataclasses
import io

from rich.console import Console

from harnessrl_jax.monitor import ForkView, print_rollout, print_rollouts, view
from harnessrl_jax.trajectories.lineage import build_lineage


def printed(*arguments, function=print_rollout, colour=None, **options):
    console = Console(file=io.StringIO(), width=110, highlight=False, force_terminal=bool(colour), color_system=colour)
    function(console, *arguments, **options)
    return console.file.getvalue()


def test_a_rollout_is_a_tree_of_sessions_and_calls(seen):
    lines = [line.rstrip() for line in printed(seen).splitlines()]
    text = "\n".join(lines)
    for shown in ("rollout r7", "Which is the highest?", "Emi Koussi", "completed, reward 1.00, 4.5 s, weights 3"):
        assert shown in text
    assert "├── #0 c0  live  advantage +0.500  process reward 0.5  tool_calls, parsed ok, weights 3" in lines
    assert "│   ├── researcher  session sub-1  (its request quotes the arguments of this call)" in lines
    assert "│   │   ├── #1 c1  superseded  not trained: superseded  tool_calls, parsed ok, weights 3" in lines
    assert "│   └── critic  session check  frozen  (its request quotes the arguments of this call)" in lines
    assert "    prompt: 5 new tokens after the 22 of call #0" in lines
    assert "    say:Emi é." in lines
    assert "replaced by c2 (the client declared a retry)" in text


def test_colour_is_the_role_and_weight_the_credit(seen):
    text = printed(seen, colour="truecolor")
    assert "\x1b[1;38;5;208ms" in text  # c4 has most: its action is bold orange
    assert "\x1b[38;5;208ml" in text  # c2 has a quarter: plain
    assert "\x1b[2;38;5;208mg" in text  # the critic is not trained: dim


def test_long_prompts_are_shortened_in_the_middle(rollout, calls, decode, new_call):
    calls.append(new_call(9, "a" * 50 + "b" * 1000 + "c" * 50, "x:y."))
    seen = view(rollout, build_lineage(calls), decode)
    text = "".join(printed(seen, prompt_characters=100).split())
    assert "a" * 50 + "…1,000characters…" + "c" * 50 + "x:y." in text


def test_a_terminal_cannot_be_steered(seen, hostile):
    evil = dataclasses.replace(seen, rollout_id=f"[red]{hostile}", answer=hostile, detail=hostile, question=hostile)
    for function, argument in ((print_rollout, evil), (print_rollouts, [evil])):
        text = printed(argument, function=function)
        assert not [word for word in ("\x1b", "\u202e", "\ud800") if word in text]
        assert "[red]" in text


def test_the_list_has_one_line_a_rollout(seen):
    failed = dataclasses.replace(
        seen, rollout_id="r8", sessions=(), reward=None, status="infra_failure", question="q" * 200
    )
    lines = printed([seen, failed], function=print_rollouts).splitlines()
    assert lines[0].startswith("r7  attempt 0  completed  5 calls  reward 1.00  Which is the highest?")
    assert lines[1].startswith("r8  attempt 0  infra_failure  0 calls  reward none  qqq")
    assert len(lines) == 2
    assert "It made no model call." in printed(failed)


def test_a_fork_shows_both_texts_on_one_line_each(seen, hostile):
    fork = ForkView(category="reasoning", from_seq=0, position=41, before="a\n\tb" + hostile, after="")
    (central,) = seen.sessions
    changed = dataclasses.replace(central.calls[1], link="rewrites", fork=fork, sibling_of=0)
    session = dataclasses.replace(central, calls=(central.calls[0], changed), told_by="a header")
    lines = [line.strip() for line in printed(dataclasses.replace(seen, sessions=(session,))).splitlines()]
    assert "central  session main  told apart by a header" in lines
    assert "asks again what call #0 asked" in lines
    assert "rewrites: reasoning after 41 shared tokens of call #0" in lines
    assert any(line.startswith("- a⏎⇥b</pre><script>") for line in lines)
    assert "+ nothing" in lines
    assert "\x1b" not in "".join(lines)
