"""The request of a call, in any dialect -> its messages by role, as ATIF tells them apart. Pure."""

from harnessrl_jax.trajectories.interchange.atif_export import Message
from harnessrl_jax.trajectories.records import Call
from harnessrl_jax.trajectories.requests import read_request


def heard(call: Call) -> list[Message] | None:
    """What a call was asked, for `to_atif`.

    A message that answers tool calls is a result, whatever role the dialect gives it. It names its tool call where it
    answers exactly one.

    Returns:
      The messages, the instructions first; None if the request is of no known dialect.
    """
    asked = read_request(call.request)
    if asked is None:
        return None
    out: list[Message] = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    for turn in asked.messages:
        answers = turn.role == "tool" or bool(turn.ids and not turn.calls)
        message = {"role": "tool" if answers else turn.role, "content": turn.text}
        out.append(message | ({"tool_call_id": turn.ids[0]} if answers and len(turn.ids) == 1 else {}))
    return out
