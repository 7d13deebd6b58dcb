"""The format of a model that makes no tool calls: everything is text. Pure."""

from dataclasses import dataclass

from harnessrl_jax.trajectories.formats.said import Found, Said


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCalls:
    """Nothing is a call, so every sampled token is OTHER."""

    marks: tuple[str, ...] = ()
    opening: tuple[str, ...] = ()
    served: bool = False

    def read(self, said: Said) -> Found:
        """No calls."""
        return Found((), tried=False, sound=True)


NO_CALLS = NoCalls()
