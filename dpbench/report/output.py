"""Writing <results_dir>/<paper>/<artefact>.md, .csv, .svg, .png, <results_dir>/scorecard.md and index.html."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dpbench.files import require_writable, write_atomically
from dpbench.report import scorecard
from dpbench.report.grid import Grid
from dpbench.report.layout import picture_of
from dpbench.report.page import page
from dpbench.report.picture import Picture
from dpbench.report.tables import as_csv, as_markdown

# Of an SVG so much is read for the fingerprint of what it shows, which stands at its beginning.
HEAD = 4096


def write_output(grids: Sequence[Grid], results_dir: Path, say: Callable[[str], object]) -> list[Path]:
    """Write tables, figures, the scorecard and the page.

    Args:
        grids: of all artefacts, for scorecard and page show those that are given.
        results_dir: where the files go.
        say: told what is drawn, which takes a moment each.

    Returns:
        The files whose content changed; others are not touched.

    Raises:
        UserError: the folder can't be written.
    """
    require_writable(results_dir)
    changed: list[Path] = []
    for grid in grids:
        stem = results_dir / grid.artefact.stem
        stem.parent.mkdir(exist_ok=True)
        picture = picture_of(grid)
        changed += _draw(picture, stem, say) if picture is not None else _remove(stem, ".svg", ".png")
        shown = None if picture is None else f"{stem.name}.svg"
        changed += _write(stem.with_suffix(".md"), as_markdown(grid, shown))
        table = as_csv(grid)
        changed += _remove(stem, ".csv") if table is None else _write(stem.with_suffix(".csv"), table)
    changed += _write(results_dir / "scorecard.md", scorecard.as_markdown(grids))
    changed += _write(results_dir / "index.html", page(grids, results_dir))
    return changed


def _draw(picture: Picture, stem: Path, say: Callable[[str], object]) -> list[Path]:
    """Draw it unless the files there show the same; that is told by a fingerprint, for drawing takes its time."""
    # matplotlib takes half a second to import, which commands that draw nothing need not wait for.
    from dpbench.report.figures import files_of, fingerprint

    svg, png = stem.with_suffix(".svg"), stem.with_suffix(".png")
    if png.exists() and svg.exists():
        with svg.open(encoding="utf-8") as stream:
            if fingerprint(picture) in stream.read(HEAD):
                return []
    say(f"drawing {picture.title}")
    drawn = zip((svg, png), files_of(picture), strict=True)
    return [path for path, content in drawn if _write(path, content)]


def _write(path: Path, content: str | bytes) -> list[Path]:
    """The path, if its content changed."""
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and path.read_bytes() == data:
        return []
    write_atomically(path, data)
    return [path]


def _remove(stem: Path, *suffixes: str) -> list[Path]:
    """Take away what an artefact no longer has."""
    there = [stem.with_suffix(suffix) for suffix in suffixes if stem.with_suffix(suffix).exists()]
    for path in there:
        path.unlink()
    return there
