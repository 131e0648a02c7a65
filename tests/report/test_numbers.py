"""Numbers as people read them."""

import pytest

from fathom.report.numbers import in_words, short, size


@pytest.mark.parametrize(
    ("number", "words", "said"),
    [
        (512, "512", "512"),
        (999_499, "999 thousand", "999 k"),
        (999_936, "1 million", "1 M"),
        (1_234_567, "1.23 million", "1.23 M"),
        (999_999_999, "1 billion", "1 G"),
        (36e12, "36 trillion", "36 T"),
    ],
)
def test_a_number_just_below_a_prefix_takes_it(number: float, words: str, said: str) -> None:
    """999,936 parameters were 1e+03 thousand."""
    assert in_words(number) == words and short(number, 3) == said


def test_numbers_below_whole_are_written_out() -> None:
    assert [short(n, 3, "", 1e4) for n in (0, 9_996, 10_004, 123_456)] == ["0", "9996", "10k", "123k"]
    assert (short(999.96), short(-1500), size(999), size(999_999)) == ("999.96", "-1.5 k", "999 B", "1 MB")
