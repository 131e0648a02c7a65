"""Letters of other alphabets, and of phonetic writing, that look like a Latin letter.

Compatibility forms (fullwidth, mathematical, superscript letters) are not here: NFKC takes them apart.
"""

from __future__ import annotations

SHAPES = {
    **{"a": "ɑᴀ", "b": "ʙƀ", "c": "ᴄ", "d": "ᴅđ", "D": "Đ", "e": "ᴇ", "f": "ꜰ", "g": "ɡɢ", "h": "ʜħ", "H": "Ħ"},
    **{"i": "ıɩɪɨ", "j": "ȷᴊ", "k": "ᴋ", "l": "ʟł", "L": "Ł", "m": "ᴍ", "n": "ɴ", "o": "ᴏø", "O": "Ø", "p": "ᴘ"},
    **{"r": "ʀ", "s": "ꜱ", "t": "ᴛŧ", "T": "Ŧ", "u": "ᴜʉ", "v": "ᴠ", "w": "ᴡ", "y": "ʏ", "z": "ᴢ"},
}
"""Letters of Latin writing in another shape or with a stroke, which no decomposition takes apart."""

LOOKALIKES = {
    **{"A": "ΑА", "B": "ΒВ", "C": "СϹ", "E": "ΕЕ", "G": "Ԍ", "H": "ΗН", "I": "ΙІӀ", "J": "ЈͿ", "K": "ΚК", "M": "ΜМ"},
    **{"N": "Ν", "O": "ΟОՕ", "P": "ΡР", "Q": "Ԛ", "S": "ЅՏ", "T": "ΤТ", "U": "Ս", "V": "Ѵ", "W": "Ԝ", "X": "ΧХ"},
    **{"Y": "ΥУҮ", "Z": "Ζ", "a": "αа", "b": "Ьь", "c": "сϲ", "d": "ԁ", "e": "εе", "g": "ց", "h": "һհн", "i": "ιі"},
    **{"j": "јϳյ", "k": "κк", "l": "ӏ", "m": "м", "n": "ηпո", "o": "οоσօ", "p": "ρр", "q": "ԛզ", "r": "г", "s": "ѕ"},
    **{"t": "τт", "u": "υս", "v": "νѵ", "w": "ωԝ", "x": "χх", "y": "γуү", "z": "з"},
}
"""Greek, Cyrillic and Armenian letters that stand for a Latin one in a word, or among words, of Latin letters."""
