"""What the site needs beyond mkdocs.yml."""

import re

CELL = re.compile(r"<td>(.*?)</td>", re.DOTALL)
FIGURE = re.compile(r"[-−<*]*\d.{,22}$|$")
SHORTEST_SENTENCE = 30


def on_page_markdown(markdown: str, **_: object) -> str:
    """Remove the mark of examples that tests leave out: the site reads no such fences."""
    return markdown.replace("```python notest", "```python")


def on_page_content(html: str, **_: object) -> str:
    """Mark cells with a figure, not to be broken, and with sentences, which need room."""
    return CELL.sub(_marked, html)


def _marked(cell: re.Match[str]) -> str:
    text = cell[1]
    if FIGURE.match(text):
        return f'<td class="figure">{text}</td>'
    return f'<td class="words">{text}</td>' if len(text) >= SHORTEST_SENTENCE else cell[0]
