"""Pages as their readers see them, without a browser."""

from html.parser import HTMLParser

VOID = {"meta", "br", "img"}


class Reader(HTMLParser):
    """Collects the text of a page, how often each tag comes up, and whatever the page would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: dict[str, int] = {}
        self.loaded: list[str] = []
        self.names: list[str] = []
        self._words: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        if tag not in VOID:
            self.open.append(tag)
        told = {name: value or "" for name, value in attrs}
        self.loaded += [told[name] for name in ("src", "href", "xlink:href", "data") if name in told]
        self.names += [told["id"]] if "id" in told else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self._words.append(data)

    @property
    def text(self) -> str:
        """What is written, with single spaces between words."""
        return " ".join(" ".join(self._words).split())
