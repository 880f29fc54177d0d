"""A strict reader of pages: balanced tags, headings, ids, text."""

from __future__ import annotations

from html.parser import HTMLParser

_VOID = frozenset({"meta", "br", "hr", "img", "link", "input"})


class Page(HTMLParser):
    """Parses a page and fails on a tag that is closed without having been opened, or the other way round."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open_tags: list[str] = []
        self.headings: list[tuple[int, str]] = []
        self.ids: list[str] = []
        self.classes: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.tags: set[str] = set()
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open_tags == [], f"never closed: {self.open_tags}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in _VOID:
            self.open_tags.append(tag)
        if tag in {"h1", "h2", "h3", "h4", "h5", "h6"}:
            self.headings.append((int(tag[1]), ""))
        for name, value in attrs:
            self.attributes.append((tag, name, value or ""))
            if name == "id":
                self.ids.append(value or "")
            if name == "class":
                self.classes += (value or "").split()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags, f"</{tag}> closes nothing"
        opened = self.open_tags.pop()
        assert opened == tag, f"</{tag}> closes <{opened}>"

    def handle_data(self, data: str) -> None:
        if self.open_tags and self.open_tags[-1] in {"style", "script"}:
            return
        self.words.append(data)
        if self.headings and self.open_tags and any(tag in {"h1", "h2", "h3", "h4"} for tag in self.open_tags):
            level, text = self.headings[-1]
            self.headings[-1] = (level, text + data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())
