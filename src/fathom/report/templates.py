"""Jinja templates of the package, which escape inserted values, and its style sheets and scripts."""

from __future__ import annotations

import re
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

NO_BREAK = "\N{NO-BREAK SPACE}"


def source(name: str) -> Markup:
    """A style sheet or a script of the package, unescaped."""
    return Markup(files("fathom").joinpath(name).read_text(encoding="utf-8"))


ENVIRONMENT = Environment(
    loader=PackageLoader("fathom", "."),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
"""Templates are named by their path in the package, such as `report/page.html.j2`."""
ENVIRONMENT.globals["source"] = source
ENVIRONMENT.policies["json.dumps_kwargs"] = {"allow_nan": False}


def glued(text: object) -> Markup:
    """Text with non-breaking spaces, so that no line ends between a number and its sign or unit."""
    return Markup(re.sub(r"(?<=\d) (?=%)|(?<=[±×]) | (?=[±×])", NO_BREAK, str(escape(text))))


def prose(text: object) -> Markup:
    """Fathom's own sentences as HTML: with non-breaking spaces between numbers and units, and `code` between backticks
    set as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(glued(text))))


def parted(name: object) -> Markup:
    """A name with optional line breaks after underscores, colons and similar signs; a link stays unchanged."""
    return name if isinstance(name, Markup) else Markup(re.sub(r"(?<=[_+:=,/])(?=\w)", "<wbr>", str(escape(name))))


def number(cell: object) -> Markup:
    """A table cell with the hyphens before its numbers replaced by minus signs; the dash of a range stays."""
    return Markup(re.sub(r"(?<![\w.-])-(?=\d)", "−", str(escape(cell))))


ENVIRONMENT.filters |= {"glued": glued, "prose": prose, "parted": parted, "number": number}


def render(name: str, **values: object) -> str:
    """Render a template to a whole document."""
    return ENVIRONMENT.get_template(name).render(values)


def macro(name: str, template: str, *values: object) -> Markup:
    """A part of an HTML document, rendered by one macro of a template."""
    made: Markup = getattr(ENVIRONMENT.get_template(template).module, name)(*values)
    return made
