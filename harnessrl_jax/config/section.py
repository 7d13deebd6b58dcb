"""What every table of a configuration file has in common."""

import pydantic


class Section(pydantic.BaseModel):
    """A strict, frozen table of a configuration file."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
