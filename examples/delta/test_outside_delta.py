"""The package's tests: those that every mechanism must pass, and its equations in numpy."""

import numpy as np
from outside_delta import OUTSIDE_DELTA

from fathom.testing import Conformance


class TestOutsideDelta(Conformance):
    """Conformance also compares each call of the module with `numpy`."""

    mechanism = OUTSIDE_DELTA

    def numpy(self, parameters, state, *written):
        x, *sources = state
        if written:
            return [x + written[0], *(sources or [x]), written[0]]
        if not parameters or not sources:
            return x
        scores = [s @ parameters["query"] / np.sqrt((s * s).mean(-1) + 1e-6) for s in sources]
        weights = np.exp(scores) / np.exp(scores).sum(0)
        return x + parameters["gate"] * sum(w[..., None] * s for w, s in zip(weights, sources, strict=True))
