"""The Markdown of a report as one HTML file with its images inside, and its tables in other pages."""
import base64
import html
import re

import cli

# Our choices: text of a readable width. On a phone, tables are compact and figures fit the screen, because a
# reader can enlarge a figure but cannot see what is cut off; tables that are still too wide scroll.
STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1, h2, h3 { line-height: 1.25; overflow-wrap: anywhere; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; padding-bottom: 0.3rem; }
p, li { overflow-wrap: anywhere; }
div { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { border: 1px solid #ccc; padding: 0.25rem 0.6rem; text-align: left; white-space: nowrap; }
td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 9rem; }
th { background: #f2f2f2; }
img { display: block; max-width: 100%; height: auto; }
@media (max-width: 40rem) {
  table { font-size: 0.65rem; }
  th, td { padding: 0.15rem 0.25rem; white-space: normal; }
  td:first-child { min-width: 4.5rem; }
}"""


def write_page(lines, folder, title, path):
    """Write the page. lines: Markdown as report.py writes it; folder: where its images are."""
    body, start = [], 0
    while start < len(lines):
        kind, end = kind_of(lines[start]), start + 1
        while kind in ("table", "list", "text") and end < len(lines) and kind_of(lines[end]) == kind:
            end += 1                                # lines that belong together
        body.append(block(kind, lines[start:end], folder))
        start = end
    head = ('<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{html.escape(title)}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n")
    page = head + "\n".join(filter(None, body)) + "\n</body>\n</html>\n"
    path.write_text(page, encoding="utf-8", errors="replace")


def kind_of(line):
    """What a line of Markdown is part of."""
    for start, kind in {"#": "heading", "|": "table", "- ": "list", "![": "image"}.items():
        if line.startswith(start):
            return kind
    return "text" if line else "nothing"


def block(kind, lines, folder):
    """The HTML of lines that belong together; all text is escaped."""
    if kind == "heading":
        marks, _, text = lines[0].partition(" ")
        return f"<h{len(marks)}>{html.escape(text)}</h{len(marks)}>"
    if kind == "table":
        return table(lines)
    if kind == "list":
        return "<ul>\n" + "\n".join(f"<li>{html.escape(line[2:])}</li>" for line in lines) + "\n</ul>"
    if kind == "image":
        text, name = re.fullmatch(r"!\[(.*)\]\((.*)\)", lines[0]).groups()
        code = base64.b64encode((folder / name).read_bytes()).decode()
        return f'<div><img alt="{html.escape(text)}" src="data:image/png;base64,{code}"></div>'
    return f"<p>{html.escape(' '.join(lines))}</p>" if kind == "text" else ""


def table(lines):
    """The first line is the head, the second a rule. A bar inside a cell is written \\|."""
    split = [re.split(r"(?<!\\)\|", line[1:-1]) for line in lines]
    rows = [[html.escape(cell.strip().replace("\\|", "|")) for cell in row] for row in split]
    head = "".join(f"<th>{cell}</th>" for cell in rows[0])
    body = ["".join(f"<td>{cell}</td>" for cell in row) for row in rows[2:]]
    return "<div><table>\n" + "\n".join(f"<tr>{row}</tr>" for row in [head, *body]) + "\n</table></div>"


def update_tables(page, lines):
    """Replace the tables of a Markdown page by those of a report, given as its lines.

    A page marks where the tables of a section of the report go, with HTML comments that no reader sees:
    <!-- tables of: The paper's claims, digits --> before them, and <!-- end of tables --> after them.
    """
    sections, heading = {}, None
    for line in lines:
        if kind_of(line) == "heading":
            heading = line.lstrip("# ").partition(" (differs")[0]       # what follows is an explanation
        elif kind_of(line) in ("table", "nothing"):
            sections.setdefault(heading, []).append(line)

    def tables(match):
        if match[1] not in sections:
            raise cli.Refused(f"--update {page}: the report has no section '{match[1]}'")
        text = re.sub(r"\n{3,}", "\n\n", "\n".join(sections[match[1]])).strip("\n")
        return f"<!-- tables of: {match[1]} -->\n{text}\n<!-- end of tables -->"

    marks = r"<!-- tables of: (.*) -->\n(?:.*\n)*?<!-- end of tables -->"
    try:
        page.write_text(re.sub(marks, tables, page.read_text(encoding="utf-8")), encoding="utf-8")
    except OSError as error:
        raise cli.Refused(f"--update {page}: cannot be written ({error.strerror})")
