"""The gap between a parallel reading and decoding: against an oracle that decodes, and zero where rounds suffice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fathom.report.statistics import weighted_difference
from fathom.training.jacobi_gap import Row, Sample, gap_of, read_both_ways
from tests.models.cases import tokens, with_rounds
from tests.models.slot_oracle import Decoder, thinker

LENGTHS = (13, 7, 10)


def rows_of(*scored: int) -> list[Row]:
    ids = tokens(len(LENGTHS), max(LENGTHS))
    return [Row(row[:n], k) for row, n, k in zip(ids, LENGTHS, scored or [n - 1 for n in LENGTHS], strict=True)]


def nats(logits: Tensor, row: Row) -> float:
    losses = F.cross_entropy(logits[:-1], row.ids[1:], reduction="none")
    return float(losses[-row.scored :].sum())


@pytest.mark.quick("ponder2", "ponder-all")
@pytest.mark.parametrize("method", ["ponder2", "ponder3", "ponder-all"])
def test_both_readings_are_the_oracles(method: str) -> None:
    model = thinker(method, prefill="jacobi", jacobi_eval=1).eval()
    rows = rows_of(12, 4, 9)
    with torch.no_grad():
        once = [nats(model(row.ids[None], use_cache=False).logits[0], row) for row in rows]
        slowly = [nats(Decoder.of(model).truth(row.ids), row) for row in rows]
    found = read_both_ways(model, rows)
    assert found is not None and found.rounds == 1 and found.tokens == [12, 9, 4]  # the longest first
    order = (0, 2, 1)
    assert found.parallel == pytest.approx([once[i] for i in order], abs=1e-5)
    assert found.sequential == pytest.approx([slowly[i] for i in order], abs=1e-5)
    gap = gap_of([found])
    assert gap.value == pytest.approx((sum(once) - sum(slowly)) / 25, abs=1e-6) and abs(gap.value) > 1e-3
    assert (gap.tokens, gap.windows) == (25, 3)


def test_no_gap_where_the_rounds_suffice() -> None:
    model = thinker("ponder2", prefill="jacobi", jacobi_eval=2 * (max(LENGTHS) - 1)).eval()
    found = read_both_ways(model, rows_of())
    assert found is not None and abs(gap_of([found]).value) < 1e-6
    with_rounds(model, 1)
    planted = read_both_ways(model, rows_of())
    assert planted is not None and abs(gap_of([planted]).value) > 1e-3


def test_no_gap_where_no_token_reads_another() -> None:
    model = thinker("ponder2", prefill="jacobi", jacobi_eval=1).eval()
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    found = read_both_ways(model, rows_of())
    assert found is not None
    assert found.parallel == pytest.approx(found.sequential, abs=1e-5)


@pytest.mark.parametrize("method", ["ponder", "adaponder", "latent_cot"])
def test_exact_passes_need_no_rounds(method: str) -> None:
    assert read_both_ways(thinker(method).eval(), rows_of()) is None


def test_interval() -> None:
    """Over windows; several texts count by their sizes, and one window gives none."""
    one = Sample(3.0, [4, 8, 4], [4.4, 8.8, 4.0], [4.0, 8.0, 4.0])
    other = Sample(1.0, [5, 5], [6.0, 5.5], [5.0, 5.0])
    gap = gap_of([one])
    assert gap.value == pytest.approx(1.2 / 16)
    expected = weighted_difference([0.4, 0.8, 0.0], [4, 8, 4])
    assert (gap.low, gap.high) == pytest.approx((expected.low, expected.high)) and gap.low < gap.value < gap.high
    both = gap_of([one, other], [300, 100])
    assert both.value == pytest.approx(0.75 * 0.075 + 0.25 * 0.15) and both.rounds == 2.5 and both.windows == 5
    assert gap_of([Sample(3.0, [4], [4.4], [4.0])]).low is None
    assert "3 Jacobi rounds, +0.0750 [" in str(gap) and str(gap).endswith("on 16 tokens")
