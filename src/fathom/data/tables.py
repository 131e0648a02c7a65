"""Tables of separated values (`.csv`, `.tsv`): a header names the columns, and each row is a record.

`sources.py` reads the other formats of records. `corpus/verbalizer.py` writes questions about the values of a table,
for collections of `kind: table`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import TextIO

from fathom.errors import DataError

LONGEST_CELL = 1 << 26
"""Characters of a cell; without a limit a forgotten quotation mark reads the rest of a file."""


def table_rows(file: TextIO, name: str, delimiter: str) -> Iterator[dict[str, object]]:
    """The rows of a table as mappings from column names; empty lines are skipped.

    Args:
        file: An open file.
        name: The file's name in errors.
        delimiter: The separator of cells.
    """
    csv.field_size_limit(LONGEST_CELL)
    rows = csv.reader(file, delimiter=delimiter, strict=True)
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
