"""Turns the pages' formulas into MathML when the site is built. In: a page's HTML, with LaTeX between `\\(`
and `\\)` or `\\[` and `\\]` as pymdownx.arithmatex leaves it. Out: the same with `<math>` elements, which
browsers draw without a script or a font.

mkdocs calls `on_page_content` (`hooks` in mkdocs.yml). LaTeX that latex2mathml does not know is an error that
names page and formula.
"""

from __future__ import annotations

import html
import re
from typing import Any
from xml.etree import ElementTree

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
PARTS = {"mfrac": 2, "msub": 2, "msup": 2, "msubsup": 3, "munder": 2, "mover": 2, "munderover": 3, "mroot": 2}


def on_page_content(content: str, page: Any, **_: Any) -> str:
    from mkdocs.exceptions import PluginError

    def drawn(found: re.Match[str]) -> str:
        latex = html.unescape(found[3]).strip()
        try:
            return to_mathml(latex, found[2] == "[")
        except ValueError as error:
            raise PluginError(f"{page.file.src_uri}: {error}") from error

    return FORMULA.sub(drawn, content)


def to_mathml(latex: str, block: bool) -> str:
    from latex2mathml.converter import convert

    try:
        drawn = convert(
            re.sub(r"\\arg\b", r"\\operatorname{arg}", latex), display="block" if block else "inline"
        )
    except Exception as error:  # it raises many types, without a common base
        raise ValueError(f"the formula {latex!r} cannot be read ({type(error).__name__})") from error
    for element in ElementTree.fromstring(drawn).iter():
        name, text = element.tag.rpartition("}")[2], (element.text or "").strip()
        if text.startswith("\\"):
            raise ValueError(f"the formula {latex!r} has {text}, which latex2mathml does not know")
        if len(element) != PARTS.get(name, len(element)):
            raise ValueError(
                f"the formula {latex!r} has an empty part (of a fraction, a sub- or superscript)"
            )
    return re.sub(
        r"(<mi>(?:log|exp|ln)</mi>)(?=<m(?!o))", r'\1<mspace width="0.17em"/>', drawn
    )  # as LaTeX sets it
