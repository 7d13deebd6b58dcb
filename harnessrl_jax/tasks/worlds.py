"""What a run plays in: the facts behind the search tool, and the questions asked about them."""

from itertools import zip_longest
from typing import NamedTuple

from harnessrl_jax.tasks.facts import FactTable, load_facts
from harnessrl_jax.tasks.invented import invented_facts
from harnessrl_jax.tasks.questions import (
    HELDOUT_PER_TEMPLATE,
    TRAIN_PER_TEMPLATE,
    factbook_tasks,
    make_tasks,
    split_facts,
)
from harnessrl_jax.trajectories.records import Task


class World(NamedTuple):
    """The facts to index with `build_index`, and the tasks."""

    facts: FactTable
    tasks: tuple[Task, ...]


def training_world(
    *, invented_countries: int = 0, invented_per_template: int = TRAIN_PER_TEMPLATE, seed: int = 0
) -> World:
    """The training side of the World Factbook, mixed with an invented world if asked for.

    No passage about, or naming, a held-out country is in it, so none can be seen in training, not even as a line beside
    the right one in a search result.

    Args:
      invented_countries: size of the invented world; 0 = none.
      invented_per_template: at most this many invented questions of each template.
      seed: of the invented world.
    """
    real = split_facts(load_facts(), "train")
    if invented_countries == 0:
        return World(real, factbook_tasks("train", TRAIN_PER_TEMPLATE))
    invented = invented_facts(seed, invented_countries)
    both = FactTable([*real, *invented])
    sides = (
        ("factbook", set(real.countries), TRAIN_PER_TEMPLATE),
        (f"invented-{seed}", set(invented.countries), invented_per_template),
    )
    columns = [
        # One table for both, so that a value that names a country of each is not asked about.
        make_tasks(both, split="train", per_template=count, world=name, keep=names.issuperset)
        for name, names, count in sides
    ]
    return World(both, tuple(task for row in zip_longest(*columns) for task in row if task is not None))


def heldout_world(per_template: int = HELDOUT_PER_TEMPLATE) -> World:
    """The held-out questions; their haystack is the whole World Factbook."""
    return World(load_facts(), factbook_tasks("heldout", per_template))
