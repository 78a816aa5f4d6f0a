"""HTML from values: everything is escaped unless it was made here.

Names of parties, reasons for exclusions and columns of data files are untrusted, so
there is no way to put text into a page except through `element`.
"""

import html
from collections.abc import Iterable, Sequence
from typing import Final

VOID: Final = frozenset({"meta", "rect", "line", "circle", "path", "polyline"})


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def text(value: object) -> Html:
    """Return a value as text that no browser takes for markup.

    Examples
    --------
    >>> text("<b>party</b>")
    '&lt;b&gt;party&lt;/b&gt;'
    """
    return value if isinstance(value, Html) else Html(html.escape(str(value), quote=True))


def element(name: str, /, *children: object, **attributes: object) -> Html:
    """Return an element; a trailing underscore of an attribute's name is for Python's words.

    Examples
    --------
    >>> element("p", "1 < 2", class_="note")
    '<p class="note">1 &lt; 2</p>'
    """
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Html(f"<{name}{told}>" if name == "meta" else f"<{name}{told}/>")
    return Html(f"<{name}{told}>{joined(children)}</{name}>")


def joined(parts: Iterable[object]) -> Html:
    """Return parts one after the other; None is nothing."""
    return Html("".join(text(part) for part in parts if part is not None))


def setting(value: object) -> str:
    """Return a setting as the command line takes it.

    Examples
    --------
    >>> setting(True), setting(0.5), setting("")
    ('true', '0.5', '-')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else "-"


def card(title: str, *content: object, note: str = "") -> Html:
    """Return a section of a page."""
    explained = element("p", note, class_="note") if note else None
    return element("section", element("h2", title), explained, *content)


def grid(
    header: Sequence[object], rows: Iterable[Sequence[object]], numbers: Iterable[int] = ()
) -> Html:
    """Return a table that scrolls by itself on a narrow screen; some columns are numbers."""
    right = {*numbers}

    def line(cells: Sequence[object], kind: str) -> Html:
        return element(
            "tr",
            *(
                element(kind, cell, class_="number" if column in right else None)
                for column, cell in enumerate(cells)
            ),
        )

    body = [line(cells, "td") for cells in rows]
    table = element("table", element("thead", line(header, "th")), element("tbody", *body))
    return element("div", table, class_="scroll", tabindex="0")


def document(title: str, style: str, *content: object) -> str:
    """Return a whole page."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Html(style)),
    )
    page = element("html", head, element("body", element("main", *content)), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"
