"""Embedded multi-hop questions over the World Factbook: facts, search, tasks, verifier, expert."""
