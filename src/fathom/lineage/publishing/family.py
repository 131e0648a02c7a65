"""A family tree as data and as a page that loads nothing."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from fathom.lineage.shares import IF_COMPLETE
from fathom.lineage.tree import MISSING, Edge, Family, Merge, Tree, first
from fathom.report import html
from fathom.report.templates import render as render_template

SCHEMA = 1
READING = (
    "Models of one family share weights beyond chance: the matching tests are sure for a chain of pairs between them, "
    "after correction for the number of pairs.",
    "Within a family, neighbours are chosen so that the total drift is least. Drift 0.1 means that the weights moved "
    "by a tenth of their own size.",
    "Support is how often an edge stays in the tree when the layers are drawn anew, 200 times.",
    "The top of a tree is drawn, not claimed. Direction is said only where the weights lost or repeated something: "
    "rounding, zeros, repeated layers, copied experts.",
    MISSING,
    "A tree shows nothing about intent, consent or licences. Two runs from one public seed stand next to each other "
    "too.",
)


def as_json(found: Tree) -> dict[str, object]:
    """The tree as plain data."""
    families = [
        {
            "models": list(family.models),
            "edges": [asdict(edge) for edge in family.edges],
        }
        for family in found.families
    ]
    merges = [{"child": merge.child, **asdict(merge.found)} for merge in found.merges]
    note = {"merges_note": IF_COMPLETE} if merges else {}
    body = {"fathom_lineage_tree": SCHEMA, "pairs": found.pairs, "families": families, "merges": merges}
    return {**body, "note": MISSING, **note}


def write(out: Path, found: Tree) -> None:
    """report.json and report.html in a directory."""
    out.mkdir(parents=True, exist_ok=True)
    html.write(out, as_json(found), render(found))


def render(found: Tree) -> str:
    """The page of a tree."""
    related = [family for family in found.families if len(family.models) > 1]
    alone = [family.models[0] for family in found.families if len(family.models) == 1]
    count = sum(len(family.models) for family in found.families)
    words = {0: "no family", 1: "1 family"}.get(len(related), f"{len(related)} families")
    return render_template(
        "lineage/publishing/tree.html.j2",
        title="Fathom family tree",
        sentence=f"Among {count} models there {'are' if len(related) > 1 else 'is'} {words} of related ones; "
        f"{len(alone)} {'has' if len(alone) == 1 else 'have'} no relative here.",
        meaning="Related means: made from one another, from a common source, or started from the same random numbers.",
        families=[_shown(number, family) for number, family in enumerate(related)],
        merges=[*map(_mean, found.merges), *[IF_COMPLETE] * bool(found.merges)],
        alone=alone,
        reading=READING,
    )


def _mean(merge: Merge) -> str:
    parts = [f"{s.share:.1%} of {s.parent} (95 % interval {s.low:.1%} to {s.high:.1%})" for s in merge.found.shares]
    return f"{merge.child} is a weighted mean: {' and '.join(parts)}; {merge.found.residual:.1%} is unexplained."


def _shown(number: int, family: Family) -> dict[str, object]:
    title = f"Family {number + 1}: {len(family.models)} models"
    return {"title": title, "root": _node(family, first(family), None)}


def _node(family: Family, model: str, edge: Edge | None) -> dict[str, object]:
    below = [e for e in family.edges if model in (e.a, e.b) and e is not edge]
    shown = edge and {
        "verdict": edge.verdict,
        "drift": f"{edge.drift:.2f}",
        "support": f"{edge.support:.0%}",
        "direction": f"Direction: {edge.direction}." if edge.direction.made else "Direction cannot be told.",
    }
    return {"name": model, "edge": shown, "below": [_node(family, e.b if e.a == model else e.a, e) for e in below]}
