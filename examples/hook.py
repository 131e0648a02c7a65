"""A training hook: ends a run once the held-out loss stops falling, and says so."""

from pathlib import Path

import fathom

RECIPE = Path(__file__).with_name("small.yaml")


class StopWhenFlat(fathom.Hook):
    """Stops after an evaluation that is not better than the best one by `least` nats per token."""

    def __init__(self, least: float = 0.01) -> None:
        self.least, self.best = least, float("inf")

    def after_evaluation(self, run, evaluation):
        if evaluation.loss > self.best - self.least:
            run.say(f"held-out loss {evaluation.loss:.3f} is no better than {self.best:.3f}")
            run.stop()
        self.best = min(self.best, evaluation.loss)
        run.log({"best_loss": self.best})

    def state(self):  # kept in every checkpoint, so that a continued run knows it
        return {"best": self.best}

    def load(self, state):
        self.best = state["best"]


if __name__ == "__main__":
    recipe = fathom.load_recipe(RECIPE, ["optim.lr=1e-9", "evaluate.every=2"])  # so low a rate is flat at once
    result = fathom.train(recipe, "runs/hook", callbacks=[StopWhenFlat()])
    print(f"stopped after {result.step} of {recipe.train.steps} steps")
