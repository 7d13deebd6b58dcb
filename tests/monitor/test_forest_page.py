import dataclasses

from harnessrl_jax.monitor import ForkView, forests_html, html_page


def test_a_forest_shows_credit_reasons_and_forks(seen):
    fork = ForkView(category="compaction", from_seq=4, position=1234, before="old", after="new")
    (central,) = seen.sessions
    changed = dataclasses.replace(central.calls[1], link="continues", fork=fork, sibling_of=0)
    session = dataclasses.replace(central, calls=(central.calls[0], changed), told_by="a header")
    html = forests_html([dataclasses.replace(seen, sessions=(session,))])
    for shown in (
        "advantage +0.500",
        "not trained: superseded",
        "continues: compaction",
        "after 1,234 shared tokens of call #4: <del>old</del> <ins>new</ins>",
        "asks again what #0 asked",
        "told apart by a header",
        "replaced by c2",
    ):
        assert shown in html
    assert "training</span>" not in html


def test_a_page_stands_alone_and_does_no_harm(seen, hostile):
    fork = ForkView(category=hostile, from_seq=0, position=1, before=hostile, after=hostile)
    (central,) = seen.sessions
    changed = dataclasses.replace(central.calls[1], fork=fork, new_prompt=hostile, mask_reason=hostile, advantage=None)
    session = dataclasses.replace(
        central, agent=hostile, session_id=hostile, told_by=hostile, calls=(central.calls[0], changed)
    )
    evil = dataclasses.replace(
        seen, sessions=(session,), answer=hostile, question=hostile, rollout_id=hostile, detail=hostile
    )
    page = html_page("A title", "", forests_html([evil]))
    assert page.startswith("<!doctype html>")
    for word in ("<script", "\x1b", "\u202e", "\ud800", "http://", "https://", " src="):
        assert word not in page
    page.encode("utf-8")


def test_no_rollout_is_no_card():
    assert "article" not in forests_html([])
