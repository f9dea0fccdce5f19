"""An HTML report as tests read it."""

import json
from html.parser import HTMLParser


class Reader(HTMLParser):
    """Tags with their attributes, text outside scripts, and the scripts."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text, self.scripts, self.inside = [], "", [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag if tag in ("script", "style") else ""
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts[-1] += data
        elif not self.inside:
            self.text += data


def data_of(page):
    return json.loads(Reader(page).scripts[0])
