"""Docstrings as the site shows them."""

import re
from typing import Any

import griffe

CHOICES = re.compile(r'^( *\w+ : )("[^"\n]+"(?:,? (?:or )?"[^"\n]+")+)', re.MULTILINE)
PROMISE = re.compile(r"^(Leaves the party|Guarantee)\n((?: {4}.*(?:\n|$))+)", re.MULTILINE)


def _paragraph(found: re.Match[str]) -> str:
    lines = [line.strip() for line in found[2].splitlines()]
    return f"\n**{found[1]}.** " + "\n".join(lines) + "\n"


def _words(found: re.Match[str]) -> str:
    """Return quoted words with other hyphens: they would be read as differences."""
    return found[1] + found[2].replace("-", "\N{NON-BREAKING HYPHEN}")


class Promises(griffe.Extension):
    """What leaves a party and what is guaranteed: a paragraph each."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one class or function."""
        if obj.docstring:
            text = CHOICES.sub(_words, obj.docstring.value)
            obj.docstring.value = PROMISE.sub(_paragraph, text)
