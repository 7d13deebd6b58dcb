"""Embedded multi-hop questions over the World Factbook: facts, search, questions, verifier, expert, task sources.

Names load on first use; none of them needs JAX.
"""

import importlib
from typing import Any

_HOME = {
    "PERFECT": "policy",
    "ExpertSampler": "expert",
    "Fact": "facts",
    "FactTable": "facts",
    "FactbookSource": "source",
    "JsonLinesSource": "source",
    "Mistakes": "policy",
    "Passage": "facts",
    "SearchIndex": "search",
    "TaskSource": "source",
    "TaskStream": "stream",
    "TfdsSource": "source",
    "World": "worlds",
    "best_exact_match": "verifier",
    "best_f1": "verifier",
    "build_index": "search",
    "expected_score": "simulate",
    "heldout_tasks": "questions",
    "heldout_world": "worlds",
    "invented_facts": "invented",
    "invented_tasks": "invented",
    "load_facts": "facts",
    "process_rewards": "process",
    "split_facts": "questions",
    "train_tasks": "questions",
    "training_world": "worlds",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its names are {', '.join(__all__)}")
