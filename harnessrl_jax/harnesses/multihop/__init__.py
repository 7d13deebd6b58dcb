"""The multi-hop harness: a question and a search index -> an answer, found by a central agent and its researchers."""
