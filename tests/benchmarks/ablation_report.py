"""Cells of both stages -> the Markdown tables of docs/results/capo.md. Pure functions."""

from collections.abc import Sequence

from ablation_statistics import Line, arms_of, markdown, mean_shown, paired, shown, table

SCORES = {"before": "before", "after": "after", "area": "reward_area"}
SKILLS = {"action": "action_after", "args": "args_after", "KL action": "kl_action_after", "KL args": "kl_args_after"}
CONFLICT = {
    "cosine": "cosine",
    "mass": "mass",
    "cosine, shared": "cosine_shared",
    "retained action": "retained_action",
    "retained args": "retained_args",
    "Jaccard": "jaccard",
    "weights moved": "moved",
    "CPU s a step": "step_cpu_s",
}


def same_weights(arm: str) -> str | None:
    """The arm that trains at least the same weights with the same loss, and no partition."""
    if arm == "two adapters":
        return "one adapter"
    if arm.endswith("sum"):
        return "plain, role means"
    return "ffn, role means" if arm.endswith("frozen") else None


def by_lot(arm: str) -> str | None:
    """The arm whose partition of the same size is drawn at random."""
    kappa_and_rest = arm.split(" ")[-2:]
    known = ("raw", "contrast", "entropy", "swapped", "shuffled", "local", "renewed")
    return " ".join(["random", *kappa_and_rest]) if arm.split(" ")[0] in known else None


CONTROLS = {"minus plain": lambda arm: "plain", "minus no partition": same_weights, "minus random": by_lot}


HEADLINES = (
    ("contrast 0.25 frozen", "random 0.25 frozen"),
    ("contrast 0.25 frozen", "ffn, role means"),
    ("contrast 0.25 sum", "random 0.25 sum"),
    ("contrast 0.25 sum", "plain, role means"),
)


def small_report(lines: Sequence[Line]) -> str:
    """All tables of stage 1: an overview, then rewards, differences, skills and conflict of each setting."""
    parts = ["### All settings, held-out reward\n", regime_table(lines, HEADLINES, "after") + "\n"]
    for setting in dict.fromkeys((line["regime"], line["mode"], line["rate"]) for line in lines):
        here = [line for line in lines if (line["regime"], line["mode"], line["rate"]) == setting]
        arms = arms_of(here)
        regime, mode, rate = setting
        parts.append(f"### {regime}, {mode}, rate {rate:g}\n")
        parts.append(table(here, arms, means=SCORES, against=CONTROLS, value="after") + "\n")
        if len(arms) > 1:
            parts.append("Area under the reward curve:\n")
            parts.append(table(here, arms, means={}, against=CONTROLS, value="reward_area") + "\n")
        parts.append(table(here, arms, means=SKILLS | CONFLICT, against={}, value="after") + "\n")
    return "\n".join(parts)


def embedded_report(lines: Sequence[Line]) -> str:
    """The table of stage 2."""
    arms = arms_of(lines)
    controls = {f"minus {name}": (lambda arm, name=name: name) for name in ("plain", "ffn", "random") if name in arms}
    means = SCORES | {"cosine": "capo/cosine", "Jaccard": "capo/jaccard"}
    return table(lines, arms, means=means, against=controls, value="after") if arms else ""


def conflict_report(lines: Sequence[Line]) -> str:
    """One row a setting and stage of training: the cosines of each seed, and the share of signal in a step."""
    shown_as = {
        "cosine in a step": "all_step_cosine",
        "cosine without noise": "all_cosine",
        "MLP, in a step": "mlp_step_cosine",
        "MLP, without noise": "mlp_cosine",
        "signal, action": "all_signal_action",
        "signal, args": "all_signal_args",
    }
    rows = []
    for setting in dict.fromkeys((line["regime"], line["mode"], line["steps"]) for line in lines):
        here = [line for line in lines if (line["regime"], line["mode"], line["steps"]) == setting]
        values = [", ".join(f"{line[key]:.2f}" for line in here) for key in shown_as.values()]
        rows.append([f"{setting[0]}, {setting[1]}", str(setting[2]), *values])
    return markdown(["setting", "steps", *shown_as], rows)


def regime_table(lines: Sequence[Line], pairs: Sequence[tuple[str, str]], value: str) -> str:
    """One row a setting: the paired difference of each (arm, control)."""
    rows = []
    for setting in dict.fromkeys((line["regime"], line["mode"], line["rate"]) for line in lines):
        here = [line for line in lines if (line["regime"], line["mode"], line["rate"]) == setting]
        found = [shown(paired(here, *pair, value)) for pair in pairs]
        if any(found):
            scores = [mean_shown(here, "plain", name) for name in ("before", "after", "cosine")]
            rows.append([f"{setting[0]}, {setting[1]}, {setting[2]:g}", *scores, *found])
    names = [f"{arm} - {control}" for arm, control in pairs]
    return markdown(["setting", "plain before", "plain after", "cosine", *names], rows)
