"""`prepare` with the fields of its options as keywords, as the command line has them."""

from dataclasses import fields

from fathom.corpus import prepare as module
from fathom.corpus.prepare import PrepareOptions, Summary

OWN = {field.name for field in fields(PrepareOptions)}


def prepare(*arguments: object, **given: object) -> Summary:
    own = {name: value for name, value in given.items() if name in OWN}
    rest = {name: value for name, value in given.items() if name not in OWN}
    return module.prepare(*arguments, **rest, options=PrepareOptions(**own))
