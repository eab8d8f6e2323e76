"""A page as a test sees it: checked for well-formedness while it is read."""

from __future__ import annotations

import json
from html.parser import HTMLParser

VOID = {"meta", "link", "input", "br", "hr", "img"}
CLOSES_P = {"p", "div", "ul", "table", "section", "article", "details", "figure", "h1", "h2", "h3", "h4", "pre", "dl"}


class Page(HTMLParser):
    """Tags with their attributes, and texts; raises AssertionError for tags that do not fit together.

    Attributes:
        tags: (name, attributes) in order. values: (path, value) of everything with data-value.
        texts: text outside style and script. ids: all ids.
    """

    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.values: list[tuple[str | None, object]] = []
        self.scripts: list[str] = []
        self.ids: list[str] = []
        self._stack: list[str] = []
        self._texts: list[str] = []
        self.feed(html)
        self.close()
        assert not self._stack, f"not closed: {self._stack}"
        assert len(self.ids) == len(set(self.ids)), "an id stands twice"

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice"
        found = dict(attrs)
        assert not (tag in CLOSES_P and "p" in self._stack), f"<{tag}> inside <p>"
        if tag not in VOID:
            self._stack.append(tag)
        self.tags.append((tag, found))
        if "id" in found:
            self.ids.append(found["id"] or "")
        if "data-value" in found:
            self.values.append((found.get("data-path"), json.loads(found["data-value"] or "")))

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._stack.pop()

    def handle_endtag(self, tag):
        assert self._stack and self._stack[-1] == tag, f"</{tag}> closes {self._stack[-3:]}"
        self._stack.pop()

    def handle_data(self, data):
        if "script" in self._stack:
            self.scripts.append(data)
        elif "style" not in self._stack:
            self._texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self._texts).split())

    def all(self, tag: str, **attrs: str) -> list[dict[str, str | None]]:
        """Attributes of all such tags; `cls` is a word of their class."""
        cls = attrs.pop("cls", None)
        return [
            found
            for name, found in self.tags
            if name == tag
            and (cls is None or cls in (found.get("class") or "").split())
            and all(found.get(k) == v for k, v in attrs.items())
        ]


def resolve(data, pointer: str):
    """The value at a JSON pointer (RFC 6901)."""
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        data = data[int(part)] if isinstance(data, list) else data[part]
    return data


def leaves(data, pointer: str = "") -> dict[str, float]:
    """Every number below `data` by its pointer."""
    if isinstance(data, bool) or data is None or isinstance(data, str):
        return {}
    if isinstance(data, int | float):
        return {pointer: data}
    items = data.items() if isinstance(data, dict) else enumerate(data)
    return {
        k: v
        for key, value in items
        for k, v in leaves(value, f"{pointer}/{str(key).replace('~', '~0').replace('/', '~1')}").items()
    }
