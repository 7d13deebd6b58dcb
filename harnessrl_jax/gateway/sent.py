"""What a stream has shown of a turn -> what is left to show."""

from harnessrl_jax.errors import GatewayError
from harnessrl_jax.gateway.exchange import Choice, Kind


class Sent:
    """The text of one choice that is out already."""

    def __init__(self) -> None:
        self._text: dict[Kind, str] = {"reasoning": "", "content": ""}

    def add(self, kind: Kind, delta: str) -> None:
        """Notes what goes out."""
        self._text[kind] += delta

    def rest(self, choice: Choice) -> list[tuple[Kind, str]]:
        """What is missing, reasoning first.

        Raises:
          GatewayError: the turn does not begin with what was sent.
        """
        out: list[tuple[Kind, str]] = []
        for kind, whole in self.whole(choice):
            if not whole.startswith(self._text[kind]):
                raise GatewayError(
                    f"The stream has sent {self._text[kind][-40:]!r} as the end of its {kind}, but the turn reads "
                    f"{whole[:80]!r}. Text that may still change must be held back."
                )
            if rest := whole[len(self._text[kind]) :]:
                out.append((kind, rest))
        return out

    @staticmethod
    def whole(choice: Choice) -> list[tuple[Kind, str]]:
        """The text of a turn by kind."""
        return [("reasoning", choice.reasoning), ("content", choice.content or "")]
