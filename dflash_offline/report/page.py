"""The page as a list of blocks, and its two forms. Nothing in it needs a network: plots and style are inside."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Table:
    """``right`` names the columns that hold numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    right: Sequence[int] = ()


@dataclass(frozen=True)
class Plot:
    """An SVG figure; in Markdown a link to ``NAME.svg`` beside the page."""

    name: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Code:
    text: str


Block = Heading | Text | Table | Plot | Code

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem; border-bottom: 1px solid #ddd }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums }
th, td { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top } th { border-bottom: 1px solid #888 }
.n { text-align: right } figure { margin: 1rem 0 } svg { max-width: 100%; height: auto }
figcaption { color: #555; font-size: .9rem } pre { background: #f5f5f5; padding: .6rem; overflow-x: auto }
""".strip()


def markdown(blocks: Sequence[Block]) -> str:
    """The page as Markdown."""
    lines: list[str] = []
    for block in blocks:
        match block:
            case Heading(text, level):
                lines += [f"{'#' * level} {text}", ""]
            case Text(text):
                lines += [text, ""]
            case Code(text):
                lines += ["```", text.rstrip("\n"), "```", ""]
            case Plot(name, caption, _):
                lines += [f"![{caption}]({name}.svg)", ""]
            case Table(columns, rows, right):
                rule = ["---:" if i in right else "---" for i in range(len(columns))]
                lines += [_row(columns), _row(rule), *[_row(row) for row in rows], ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _row(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def self_contained_html(title: str, blocks: Sequence[Block]) -> str:
    """The page as one HTML file."""
    parts = [
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n"
    ]
    for block in blocks:
        match block:
            case Heading(text, level):
                parts.append(f"<h{level}>{html.escape(text)}</h{level}>\n")
            case Text(text):
                parts.append(f"<p>{html.escape(text)}</p>\n")
            case Code(text):
                parts.append(f"<pre>{html.escape(text)}</pre>\n")
            case Plot(name, caption, svg):
                inside = _own_ids(svg, name)
                parts.append(f"<figure>\n{inside}\n<figcaption>{html.escape(caption)}</figcaption>\n</figure>\n")
            case Table(columns, rows, right):
                head = "".join(f"<th{_number(i, right)}>{html.escape(str(cell))}</th>" for i, cell in enumerate(columns))
                body = "".join(
                    "<tr>" + "".join(f"<td{_number(i, right)}>{html.escape(str(cell))}</td>" for i, cell in enumerate(row)) + "</tr>\n"
                    for row in rows
                )
                parts.append(f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n")
    return "".join(parts) + "</body>\n</html>\n"


def _number(column: int, right: Sequence[int]) -> str:
    return ' class="n"' if column in right else ""


def _own_ids(svg: str, name: str) -> str:
    """Ids of several figures must differ inside one page."""
    return svg.replace('id="', f'id="{name}-').replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
