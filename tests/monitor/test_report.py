import dataclasses
from html.parser import HTMLParser

import numpy as np
import pytest

from harnessrl_jax.monitor import MetricsWriter, Report, TokenView, render, view, write_report
from harnessrl_jax.monitor.report import SECTIONS
from harnessrl_jax.trajectories.lineage import build_lineage
from harnessrl_jax.trajectories.records import Role

VOID = {"meta", "link", "img", "br", "hr", "input"}
CLOSED_BY_SLASH = {"circle", "path", "line", "rect"}


class Page(HTMLParser):
    """Checks that tags nest, and collects what a test asks for."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        assert tag in CLOSED_BY_SLASH
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attributes]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    def values(self, name):
        return [value for _, attribute, value in self.attributes if attribute == name]

    def has_class(self, name):
        return sum(name in value.split() for value in self.values("class"))


@pytest.fixture
def run_dir(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"heldout/f1": 0.25, "heldout/em": 0.2})
        for step in range(1, 13):
            metrics = {"reward": step / 12, "f1": step / 15, "loss": -0.1, "entropy": 1.0, "kl": 0.01, "grad_norm": 2.0}
            metrics |= {"capo/cosine": -0.5, "capo/cosine_valid": float(step > 1)}
            metrics |= {"capo/mass": -0.1, "capo/mass_valid": float(step > 3), "capo/retained_action": 0.5}
            metrics |= {"capo/retained_args": 0.25, "capo/retained_args_valid": 1.0}
            metrics |= {"capo/cosine_layer": np.array([-1.0, 0.5]), "capo/cosine_layer_valid": np.array([1, step > 1])}
            metrics |= {"capo/jaccard_layer": [0.0, 0.25], "capo/jaccard_layer_valid": [0.0, 1.0]}
            metrics |= {f"capo/{part}_layer": [8.0, 6.0] for part in ("action_only", "args_only", "shared", "neither")}
            writer.write(step, metrics)
    return tmp_path


def test_the_page_is_whole_and_needs_nothing_else(run_dir, summary, seen):
    path = write_report(run_dir, summary=summary, config="steps = 12\n", before=[seen], after=[seen], about="A demo.")
    assert path == run_dir / "report.html"
    page = Page(path.read_text(encoding="utf-8"))
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert all(value.startswith("#") for value in page.values("href"))
    assert not page.values("src")
    assert not [word for word in ("url(", "@import", "http") if word in path.read_text()]
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    ids = page.values("id")
    assert ids == [name.lower() for name in SECTIONS]
    assert [value.removeprefix("#") for value in page.values("href")] == ids
    assert not list(run_dir.glob("*.draft"))


def test_the_result_stands_at_the_top(run_dir, summary):
    html = render(Report(summary=summary, records=[], config=""))
    assert '<span class="delta up">+0.375</span>' in html
    assert '<span class="delta down">-0.100</span>' in html
    text = " ".join(Page(html).text)
    scores = ["0.250 →", "0.625", "+0.375", "-0.100", "64 held-out questions"]
    for shown in (*scores, "2 min 05 s", "1,234", "too long", "rollouts", "1 min 40 s", "83 %"):
        assert shown in text


def test_every_curve_and_diagnostic_is_drawn(run_dir, summary):
    html = write_report(run_dir, summary=summary, config="").read_text()
    titles = [
        "Training questions: mean of each step's rollouts", "Held-out questions", "Loss", "Entropy of the policy, nats",
        "KL from the sampling policy, nats", "Gradient norm before clipping", "Conflict: cosine of action and argument",
        "Conflict mass: what layers of opposite gradients add to the cosine", "Conflict by layer",
        "Share of each role's squared gradient that its partition keeps", "Units of each layer by partition",
        "Overlap of the two partitions (Jaccard index)",
    ]  # fmt: skip
    for title in titles:
        assert title.replace("'", "&#x27;") in html
    assert Page(html).tags.count("svg") == len(titles)
    # Undefined cosines are left out: 11 of 12 points, and 23 of 24 cells of the strip.
    assert html.count("<title>cosine, step ") == 11
    assert "<title>cosine, step 1:" not in html
    assert html.count("<title>mass, step ") == 9
    assert html.count("<title>action, step ") == html.count("<title>arguments, step ") == 12
    assert html.count("<title>layer 0, step ") == 12  # the strip; layer 0 has no defined overlap
    assert html.count("<title>layer 1, step ") == 11 + 12
    assert "<title>layer 1, shared: 6 units</title>" in html


def test_a_run_without_metrics_rollouts_or_scores_has_a_page(summary, tmp_path):
    bare = dataclasses.replace(
        summary, heldout_f1_start=None, heldout_f1_end=None, heldout_em_start=None, heldout_em_end=None, dropped={},
        time_s={}, counts={},
    )  # fmt: skip
    page = Page(write_report(tmp_path, summary=bare, config="").read_text())
    assert page.values("id") == ["result", "accounting", "configuration"]
    assert {"nothing was dropped", "not measured"} <= set(page.text)


def test_tokens_are_coloured_by_role_and_credit(summary, seen):
    page = Page(render(Report(summary=summary, records=[], config="", after=[seen])))
    assert page.tags.count("u") == sum(len(call.tokens) for call in seen.calls()) + 5  # five in the legend
    # c0 has half the largest advantage, c4 all of it, c2 a negative quarter.
    assert {"--w:0.50", "--w:1.00", "--w:0.25", "--w:0.30"} <= set(page.values("style"))
    assert page.has_class("minus") == 1 + 4  # legend; c2: name, colon, argument, end
    text = " ".join(page.text)
    for shown in ("advantage +0.500", "advantage -0.250", "not trained: superseded", "not trained: frozen agent"):
        assert shown in text
    assert "replaced by c2" in text
    assert page.has_class("session") == 3


def test_the_same_task_before_and_after_is_one_card(summary, seen):
    other = dataclasses.replace(seen, task_id="other")
    page = Page(render(Report(summary=summary, records=[], config="", before=[seen, other], after=[seen])))
    assert page.tags.count("article") == 2
    chips = [text for text in page.text if text in ("before training", "after training")]
    assert chips == ["before training", "after training", "before training"]


def test_hostile_text_stays_text(run_dir, summary, rollout, calls, task, decode, hostile, new_call):
    names = dict(session_id=hostile, agent=hostile, call_id=hostile)
    calls.append(new_call(7, f"Q{hostile[:-1]}", "say:x.", **names))
    lineage = build_lineage(calls)
    evil = dataclasses.replace(rollout, answer=hostile, detail=hostile, rollout_id=hostile, task_id=hostile)
    seen = view(evil, lineage, decode, task=dataclasses.replace(task, question=hostile, answers=(hostile,)))
    summary = dataclasses.replace(summary, name=hostile, dropped={hostile: 1}, counts={hostile: 1}, time_s={hostile: 1})
    token = TokenView(text=hostile, role=Role.ACTION)
    spoken = dataclasses.replace(seen.sessions[0].calls[0], tokens=(token,), sessions=())
    said = dataclasses.replace(seen, sessions=(dataclasses.replace(seen.sessions[0], calls=(spoken,)),))
    path = write_report(run_dir, summary=summary, config=hostile, before=[seen], after=[said], about=hostile)
    html = path.read_text(encoding="utf-8")
    assert "script" not in Page(html).tags
    assert not [word for word in ("<script>", "\x1b", "\u202e") if word in html]
    assert html.count("&lt;script&gt;") >= 14


def test_a_long_run_of_a_deep_model_stays_small(summary):
    layers = 28
    vector = {f"capo/{name}_layer": [0.25] * layers for name in ("cosine", "jaccard", "action_only", "args_only")}
    vector |= {f"capo/{name}_layer": [0.25] * layers for name in ("shared", "neither")}
    records = [{"step": step, "reward": 0.5, "loss": 0.1} | vector for step in range(1, 3001)]
    html = render(Report(summary=summary, records=records, config=""))
    assert "columns: means of 19 steps" in html
    assert len(html) < 3_000_000
