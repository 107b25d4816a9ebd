"""Pages link to files of the repository that are no pages, and show its pictures, as GitHub does; mkdocs knows neither.
Its hooks turn such links into those of the repository (``repo_url``) or, without one, into the file's name, and bring
the pictures along."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parents[1]
PICTURES = "benchmarks/results"
_LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)\s#]+)(#[^)\s]*)?\)")
_PICTURE = re.compile(r'(src|srcset)="(\.\./[^"]+)"')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for picture in sorted((ROOT / PICTURES).glob("summary*")):
        files.append(File.generated(config, f"{PICTURES}/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def in_repository(path: str) -> str:
        return posixpath.normpath(posixpath.join(folder, path))

    def link(match: re.Match[str]) -> str:
        text, path, heading = match.groups(default="")
        target = in_repository(path)
        if target.startswith("docs/"):
            return match[0]
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/HEAD/{target}{heading})"
        return text if target in text else f"{text} (`{target}`)"

    def picture(match: re.Match[str]) -> str:
        return f'{match[1]}="{get_relative_url(in_repository(match[2]), page.url)}"'

    return _PICTURE.sub(picture, _LINK.sub(link, markdown))
