"""A rollout's view -> the terminal: its forest, what each call saw and said, roles, credit and reasons."""

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text
from rich.tree import Tree

from harnessrl_jax.monitor.views import CallView, ForkView, RolloutView, SessionView, printable
from harnessrl_jax.trajectories.records import Role

STYLES = {Role.ACTION: "dark_orange", Role.ARGS: "dodger_blue1", Role.OTHER: "grey62", Role.NONE: "grey42"}
PROMPT_CHARACTERS = 600


def print_rollout(console: Console, rollout: RolloutView, *, prompt_characters: int = PROMPT_CHARACTERS) -> None:
    """Prints one rollout.

    Args:
      console: where to.
      rollout: the view.
      prompt_characters: how much of each call's new prompt to show; its middle is left out.
    """
    strongest = max((abs(call.advantage) for call in rollout.calls() if call.advantage is not None), default=0.0)
    console.print(Panel(_head(rollout), title=Text(f"rollout {printable(rollout.rollout_id)}"), title_align="left"))
    console.print(_legend())
    if not rollout.sessions:
        console.print(Text("It made no model call.", style="italic"))
    for session in rollout.sessions:
        console.print(_session_tree(session, strongest, prompt_characters))


def print_rollouts(console: Console, rollouts: Sequence[RolloutView]) -> None:
    """Prints one line for each rollout, to choose from."""
    for rollout in rollouts:
        calls = sum(1 for _ in rollout.calls())
        line = Text.assemble(
            (printable(rollout.rollout_id), "bold"), f"  attempt {rollout.attempt}  {rollout.status}  {calls} calls  "
        )
        line.append(f"reward {_reward(rollout)}  ", style="cyan")
        line.append(printable(rollout.question), style="grey62")
        console.print(line, no_wrap=True, overflow="ellipsis", crop=True)


def _head(rollout: RolloutView) -> RenderableType:
    lines = [
        ("question", rollout.question or rollout.task_id),
        ("wanted", " | ".join(rollout.answers) or "unknown"),
        ("answered", rollout.answer if rollout.answer is not None else "nothing"),
        ("result", f"{rollout.status}, reward {_reward(rollout)}, {rollout.wall_s:.1f} s, weights {rollout.version}"),
        ("detail", rollout.detail),
    ]
    return Group(*(Text.assemble((f"{name:<10}", "bold"), printable(value)) for name, value in lines if value))


def _legend() -> Text:
    text = Text("roles: ")
    for role in (Role.ACTION, Role.ARGS, Role.OTHER):
        text.append(role.name, style=STYLES[role]).append("  ")
    return text.append("bold: much credit; dim: not trained, or none")


def _session_tree(session: SessionView, strongest: float, prompt_characters: int) -> Tree:
    label = Text.assemble((printable(session.agent), "bold"), f"  session {printable(session.session_id)}")
    label.append("" if session.trainable else "  frozen", style="magenta")
    label.append(f"  told apart by {session.told_by}" if session.told_by else "", style="grey62")
    label.append(f"  ({session.opened})" if session.opened else "", style="grey62")
    tree = Tree(label, guide_style="grey42")
    for call in session.calls:
        branch = tree.add(Group(_call_line(call), *_call_body(call, strongest, prompt_characters)))
        for opened in call.sessions:
            branch.add(_session_tree(opened, strongest, prompt_characters))
    return tree


def _call_line(call: CallView) -> Text:
    line = Text.assemble((f"#{call.seq} ", "bold"), (printable(call.call_id), "grey62"))
    line.append(f"  {call.state}", style="green" if call.state == "live" else "red")
    if call.advantage is None:
        line.append(f"  not trained: {printable(call.mask_reason)}", style="yellow")
    else:
        line.append(f"  advantage {call.advantage:+.3f}", style="green" if call.advantage >= 0 else "red")
    if call.process_reward is not None:
        line.append(f"  process reward {call.process_reward:g}")
    line.append(f"  {call.finish}, parsed {call.parse_status}, weights {call.version}", style="grey62")
    if call.sibling_of is not None:
        line.append(f"\nasks again what call #{call.sibling_of} asked", style="grey62")
    if call.remark:
        line.append(f"\n{printable(call.remark)}", style="grey62")
    if call.fork is not None:
        line.append(_fork(call.link, call.fork))
    return line


def _fork(link: str, fork: ForkView) -> Text:
    """The category and the text that differs, the history first."""
    text = Text(f"\n{link}: {fork.category}", style="yellow")
    text.append(f" after {fork.position} shared tokens of call #{fork.from_seq}", style="grey62")
    for mark, colour, words in (("-", "red", fork.before), ("+", "green", fork.after)):
        text.append(f"\n  {mark} {_one_line(words)}", style=colour)
    return text


def _one_line(text: str) -> str:
    return printable(text).replace("\n", "⏎").replace("\t", "⇥") or "nothing"


def _call_body(call: CallView, strongest: float, prompt_characters: int) -> list[Text]:
    known = "" if call.continues is None else f" after the {call.shared_tokens} of call #{call.continues}"
    prompt = Text(f"prompt: {call.new_tokens} new tokens{known}\n", style="grey42")
    prompt.append(printable(shorten(call.new_prompt, prompt_characters).strip("\n")), style="grey62")
    strength = abs(call.advantage) / strongest if call.advantage and strongest else 0.0
    weight = "bold " if strength > 0.5 else "" if strength > 0 else "dim "
    output = Text()
    for token in call.tokens:
        output.append(printable(token.text), style=weight + STYLES[token.role])
    return [prompt, output]


def shorten(text: str, characters: int) -> str:
    """The beginning and the end of a text, with the number of characters left out between them.

    >>> shorten("abcdefghij", 4)
    'ab … 6 characters … ij'
    """
    if len(text) <= characters:
        return text
    half = characters // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[len(text) - half :]}"


def _reward(rollout: RolloutView) -> str:
    return "none" if rollout.reward is None else f"{rollout.reward:.2f}"
