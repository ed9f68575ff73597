"""Hook of mkdocs: adds the pages of the repository's root to the site and adjusts links between them and docs/."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md"} | {name: name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")}


def on_files(files, config):
    """Add the root's pages, whose links and images into docs/ become relative to docs/."""
    for name, target in PAGES.items():
        text = re.sub(r'(\]\(|src=")docs/', r"\1", (ROOT / name).read_text())
        files.append(File.generated(config, target, content=_with_targets(text, prefix="")))
    files.append(File.generated(config, "LICENSE", content=(ROOT / "LICENSE").read_text()))
    return files


def on_page_markdown(markdown, page, config, files):
    """Replace links to the root's pages, which start with `../` there."""
    return _with_targets(markdown, prefix=r"\.\./").replace("](../LICENSE)", "](LICENSE)")


def _with_targets(text, prefix):
    """Replace the names of the root's pages, behind `prefix`, by their names on the site."""
    names = "|".join(map(re.escape, PAGES))
    return re.sub(rf"\]\({prefix}({names})", lambda match: f"]({PAGES[match[1]]}", text)
