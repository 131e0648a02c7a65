"""Tables of separated values (`.csv`, `.tsv`): a header names the columns, and each row is a record."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator
from typing import IO

from fathom.errors import DataError

LONGEST_CELL = 1 << 26
"""Characters of a cell; without a limit a forgotten quotation mark reads the rest of a file."""


def table_rows(file: IO[bytes], name: str, delimiter: str) -> Iterator[dict[str, object]]:
    """The rows of a table as mappings from column names; empty lines are skipped.

    Args:
        file: An open file.
        name: The file's name in errors.
        delimiter: The separator of cells.
    """
    csv.field_size_limit(LONGEST_CELL)
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    rows = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        header = next(rows, [])
        if len(set(header)) < len(header) or not all(header):
            raise DataError(f"{name}: its first line must name every column once: it has {', '.join(header)}")
        for row in rows:
            if not row:
                continue
            if len(row) != len(header):
                raise DataError(f"{name}:{rows.line_num}: {len(row)} cells, and the header has {len(header)}")
            yield dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise DataError(f"{name}:{rows.line_num}: {error}") from None
    finally:
        with contextlib.suppress(ValueError):  # already closed if reading ended early
            text.detach()
