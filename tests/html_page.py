"""A page as a browser would read it, for tests to look at."""

from html.parser import HTMLParser

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """A page taken apart: fails where tags do not nest."""

    def __init__(self, text):
        super().__init__()
        self.open, self.sections, self.tags, self.addresses, self.words = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append(tag)
        self.addresses += [values[name] for name in ("src", "href", "xlink:href") if name in values]
        if tag == "section":
            self.sections.append(values["id"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data.strip())

    @property
    def text(self):
        return " ".join(word for word in self.words if word)
