"""A fair comparison of two mechanisms: same data in the same order, several seeds, an interval."""

from pathlib import Path

import fathom

RECIPE = Path(__file__).with_name("small.yaml")

if __name__ == "__main__":
    recipe = fathom.load_recipe(RECIPE)
    # The first arm is the control. `equal` is the budget that they share; pairs=0 leaves out the timing.
    report = fathom.compare(recipe, "vanilla,depth_attention", "runs/compare", seeds=2, equal="tokens", pairs=0)
    print(report.verdict)
    for arm in report.arms:
        gap = arm.difference  # None for the control
        against = "" if gap is None else f", {gap.mean:+.4f} ± {gap.half_width:.4f} against the control"
        print(f"{arm.name}: {arm.loss:.4f} nats per token{against}")
    print("the page: runs/compare/report.html")
