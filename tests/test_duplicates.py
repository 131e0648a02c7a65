"""No six lines of the source stand in two places: what two files need the same way is written once and imported.

Blank lines, comments, imports, lone brackets and the first line of a docstring do not count, nor does white space.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "fathom"
SOURCES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
RUN = 6
SILENT = re.compile(r'#|"""|import |from \S+ import |\W*$')


def repeated(sources: Mapping[str, str]) -> Iterator[str]:
    """Where lines begin that have stood before."""
    seen: dict[tuple[str, ...], tuple[str, int]] = {}
    for name, source in sources.items():
        numbered = [(number, " ".join(line.split())) for number, line in enumerate(source.splitlines(), 1)]
        lines = [(number, line) for number, line in numbered if not SILENT.match(line)]
        before = None
        for i in range(len(lines) - RUN + 1):
            first = seen.setdefault(tuple(line for _, line in lines[i : i + RUN]), (name, i))
            again = first if first[0] != name or first[1] + RUN <= i else None
            goes_on = again is not None and before == (again[0], again[1] - 1)
            if again is not None and not goes_on:
                yield f"{name}:{lines[i][0]} again, as in {again[0]}"
            before = again


def test_nothing_stands_twice():
    assert list(repeated(SOURCES)) == []


def test_a_planted_pair_is_seen():
    own = SOURCES["models/draws.py"].splitlines()
    start = own.index("class DrawnTrips(Recurrence):")
    copied = "\n".join(["x = 1", "# a comment", *own[start : start + 9], "y = 2"])
    assert list(repeated({**SOURCES, "planted.py": copied})) == ["planted.py:3 again, as in models/draws.py"]
    fewer = "\n".join(own[start : start + 6])
    assert list(repeated({**SOURCES, "planted.py": fewer})) == []
    twice = "\n".join([*(f"line_{i} = {i}" for i in range(RUN)), ""] * 2)
    assert list(repeated({"planted.py": twice})) == ["planted.py:8 again, as in planted.py"]
