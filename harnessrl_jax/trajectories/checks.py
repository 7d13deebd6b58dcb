"""A field of a record -> the same field in its one form, or a RecordError that says what is wrong. NumPy only."""

import base64
import dataclasses
import difflib
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
from jaxtyping import Float32, Int32, UInt8

from harnessrl_jax.errors import RecordError

SCHEMA = 3

# A log-softmax in float32 may exceed 0 by rounding; anything above this is a probability or a bug.
LOGP_SLACK = 1e-3

T = TypeVar("T")


def need(condition: bool, where: str, name: str, given: object, wanted: str) -> None:
    """Raises RecordError with the place, the value and what was wanted, unless `condition` holds."""
    if not condition:
        raise RecordError(f"{where}: {name} must be {wanted}, got {given!r}.")


def text(where: str, name: str, value: object) -> None:
    """A non-empty string."""
    need(isinstance(value, str) and value != "", where, name, value, "a non-empty string")


def whole(where: str, name: str, value: object, at_least: int = 0) -> None:
    """An integer of at least `at_least`; a bool is none."""
    good = isinstance(value, int) and not isinstance(value, bool) and value >= at_least
    need(good, where, name, value, f"an integer of at least {at_least}")


def number(where: str, name: str, value: Any) -> float:
    """A finite number, as a Python float; a bool is none."""
    good = not isinstance(value, bool) and isinstance(value, numbers.Real)
    need(good and math.isfinite(value), where, name, value, "a finite number")
    return float(value)


def one_of(where: str, name: str, value: object, known: Sequence[str]) -> None:
    """One of the known words."""
    need(value in known, where, name, value, "one of " + ", ".join(known))


def ids(where: str, name: str, value: object) -> Int32[np.ndarray, " n"]:
    """A read-only int32 array of token ids; floats and ids outside 0..2**31-1 are refused."""
    array = np.asarray(value)
    if array.shape == (0,):
        array = array.astype(np.int32)
    good = array.ndim == 1 and np.issubdtype(array.dtype, np.integer)
    need(good, where, name, f"{array.dtype}{list(array.shape)}", "a flat sequence of integers")
    if array.size:
        low, high = int(array.min()), int(array.max())
        need(low >= 0 and high < 2**31, where, name, f"ids from {low} to {high}", "ids from 0 to 2**31 - 1")
    return _frozen(array, np.dtype(np.int32))


def logps(where: str, value: object, length: int) -> Float32[np.ndarray, " o"]:
    """A read-only float32 array of one log-probability for each of `length` sampled tokens."""
    try:
        array = _frozen(np.asarray(value), np.dtype(np.float32))
    except (TypeError, ValueError) as error:
        raise RecordError(f"{where}: logps must be numbers, got {value!r}: {error}.") from error
    if array.shape != (length,):
        raise RecordError(
            f"{where}: logps has shape {list(array.shape)} for {length} output_ids. Training needs one per sampled "
            "token, or None if the sampler gave none. The usual cause is text trimmed after sampling; stop on ids."
        )
    bad = ~(np.isfinite(array) & (array <= LOGP_SLACK))
    need(not bad.any(), where, "logps", array[bad][:3].tolist(), "finite and at most 0")
    return array


def experts(where: str, value: object, length: int) -> UInt8[np.ndarray, "token layer active"]:
    """A read-only uint8 array of the experts that each of `length` tokens went to."""
    array = np.asarray(value)
    good = array.ndim == 3 and np.issubdtype(array.dtype, np.integer) and array.size > 0
    need(good, where, "experts", f"{array.dtype}{list(array.shape)}", "integers [token, layer, active]")
    low, high = int(array.min()), int(array.max())
    need(low >= 0 and high < 256, where, "experts", f"numbers from {low} to {high}", "numbers from 0 to 255")
    if len(array) != length:
        raise RecordError(
            f"{where}: experts has {len(array)} tokens; wanted {length}, those of prompt_ids and of all output_ids but "
            "the last, or None if the sampler gave none."
        )
    return _frozen(array, np.dtype(np.uint8))


def headers(where: str, value: Mapping[str, Any]) -> dict[str, str]:
    """Header values by lower-case name."""
    for name, given in value.items():
        need(name == name.lower() != "", where, "headers", name, "named in lower case")
        need(isinstance(given, str), where, f"headers[{name!r}]", given, "a string")
    return dict(value)


def packed(array: UInt8[np.ndarray, "..."]) -> dict[str, Any]:
    """Bytes as JSON values: a token has hundreds of them, so lists of numbers would be several times as long."""
    return {"shape": list(array.shape), "base64": base64.b64encode(array.tobytes()).decode()}


def unpacked(data: Mapping[str, Any]) -> UInt8[np.ndarray, "..."]:
    """What `packed` wrote; ValueError, TypeError or KeyError if it is not that."""
    return np.frombuffer(base64.b64decode(data["base64"], validate=True), np.uint8).reshape(data["shape"])


def plain(record: Any) -> dict[str, Any]:
    """The fields of a record by name, after the schema number."""
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {"schema": SCHEMA, **fields}


def parse(cls: type[T], data: Mapping[str, Any], **convert: Callable[[Any], Any]) -> T:
    """The record that `plain` spelled out; strict about the schema number and the field names.

    Args:
      cls: a dataclass.
      data: its fields by name, and "schema".
      **convert: for a nested field, the function from its JSON form.

    Returns:
      The record.

    Raises:
      RecordError: another schema, an unknown or missing field, or a nested field of the wrong form.
    """
    where = f"{cls.__name__}.from_json"
    if data.get("schema") != SCHEMA:
        raise RecordError(
            f"{where}: got schema {data.get('schema')!r}, this version reads schema {SCHEMA}. "
            "Read the file with the version of harnessrl_jax that wrote it."
        )
    known = [field.name for field in dataclasses.fields(cast(Any, cls))]
    for key in data:
        if key != "schema" and key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise RecordError(f"{where}: unknown field {key!r}.{hint} Known fields: {', '.join(known)}.")
    if missing := [name for name in known if name not in data]:
        raise RecordError(f"{where}: missing field {', '.join(missing)}. Wanted: {', '.join(known)}.")
    try:
        values = {name: convert[name](data[name]) if name in convert else data[name] for name in known}
    except (TypeError, ValueError, KeyError) as error:
        raise RecordError(f"{where}: a nested field cannot be read: {error!r}.") from error
    return cls(**values)


def _frozen(array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """A read-only copy: a record does not change with the buffer it came from."""
    out = np.array(array, dtype)
    out.setflags(write=False)
    return out
