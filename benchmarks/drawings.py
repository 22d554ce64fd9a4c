"""Draw the pictures of the pages: `python benchmarks/drawings.py` writes docs/pictures/*.svg.

The schedules come from `bigtrain.schedules`, as in a run, and the packages from
docs/internals/architecture.md, so a picture changes with the code. `tests/test_docs.py` compares
the files with the output of this script.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

from bigtrain.schedules.in_flight import peak_in_flight
from bigtrain.schedules.orders import Action, Orders, schedule_orders

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
ARCHITECTURE = ROOT / "docs" / "internals" / "architecture.md"
RANKS, MICRO_BATCHES = 4, 8
SLOTS = {"F": 1, "B": 2}
"""A backward pass computes two products where the forward pass computes one."""
FILL = {"F": "#56B4E9", "B": "#E69F00", "soft": "#EAF3F8", "edge": "#40566B"}
"""Of the palette of Okabe and Ito, which people who see few colours can tell apart."""
FLOW = (
    ("job.yaml + words", ""),
    ("Job", "keys, checked"),
    ("Plan", "mesh, techniques, batch"),
    ("ResolvedPlan", "stages, slices, recomputation"),
    ("Runner", "wrapped model, optimizer"),
    ("Engine", "one step per global batch"),
    ("MemoryReport", "measured, predicted"),
)


def text(x: float, y: float, words: str, *, size: int = 12, style: str = "") -> str:
    """Return a line of text; `style` is further attributes."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" {style}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    """Return a rectangle."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" '
        f'fill="{fill}" stroke="{FILL["edge"]}" stroke-width="0.8"/>'
    )


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """Return a straight arrow."""
    return (
        f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{FILL["edge"]}" '
        'stroke-width="1.2" marker-end="url(#head)"/>'
    )


def picture(width: float, height: float, title: str, parts: list[str]) -> str:
    """Return an SVG file on a white background, readable in a dark page, too."""
    head = (
        f'<marker id="head" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">'
        f'<path d="M0,0 L6,3 L0,6 z" fill="{FILL["edge"]}"/></marker>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}" font-family="sans-serif" fill="#1B2733">',
            f"<title>{escape(title)}</title>",
            f"<defs>{head}</defs>",
            f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def start_slots(orders: Orders) -> dict[Action, int]:
    """Return the slot in which each action starts if every rank works as early as it can."""
    ends: dict[Action, int] = {}
    starts: dict[Action, int] = {}
    waiting = [list(row) for row in orders]
    free = [0] * len(orders)
    while any(waiting):
        for rank, row in enumerate(waiting):
            if row and all(needed in ends for needed in inputs_of(row[0], len(orders))):
                action = row.pop(0)
                arrived = [ends[needed] for needed in inputs_of(action, len(orders))]
                starts[action] = max([free[rank], *arrived])
                free[rank] = ends[action] = starts[action] + SLOTS[action.kind]
    return starts


def inputs_of(action: Action, stages: int) -> Iterator[Action]:
    """Return the actions whose results an action needs, with one stage on each rank."""
    if action.kind == "F":
        if action.stage > 0:
            yield action._replace(stage=action.stage - 1)
        return
    yield action._replace(kind="F")
    if action.stage < stages - 1:
        yield action._replace(stage=action.stage + 1)


def schedule_panel(name: str, schedule: str, top: float) -> list[str]:
    """Return one schedule: a row for each rank, and its most micro-batches in flight."""
    slot, row, left = 22.0, 24.0, 74.0
    orders = schedule_orders(schedule, RANKS, 1, MICRO_BATCHES)
    starts = start_slots(orders)
    end = max(start + SLOTS[action.kind] for action, start in starts.items())
    busy = sum(SLOTS[action.kind] for action in orders[0])
    idle = f"{end} slots, each rank idle in {end - busy} of them ({(end - busy) / end:.0%})"
    parts = [text(10, top, f"{name}: {idle}", size=13, style='font-weight="bold"')]
    for rank, actions in enumerate(orders):
        y = top + 12 + rank * row
        parts.append(text(10, y + 16, f"rank {rank}"))
        for action in actions:
            x, width = left + starts[action] * slot, SLOTS[action.kind] * slot
            parts.append(box(x, y, width, row - 4, FILL[action.kind]))
            number = str(action.micro_batch + 1)
            parts.append(text(x + width / 2, y + 15, number, style='text-anchor="middle"'))
        most = sum(peak_in_flight(actions).values())
        parts.append(text(left + end * slot + 12, y + 16, f"{most} in flight"))
    return parts


def schedules() -> str:
    """Return the picture of GPipe next to 1F1B."""
    parts = schedule_panel("GPipe", "gpipe", 26) + schedule_panel("1F1B", "1f1b", 160)
    parts += [box(74, 280, 22, 16, FILL["F"]), text(102, 293, "forward pass of a micro-batch")]
    parts += [box(330, 280, 44, 16, FILL["B"]), text(380, 293, "backward pass, twice as long")]
    parts.append(text(600, 293, "in flight: micro-batches whose activations are saved"))
    title = f"GPipe and 1F1B with {RANKS} stages and {MICRO_BATCHES} micro-batches"
    return picture(920, 310, title, parts)


def packages() -> list[tuple[str, list[str]]]:
    """Return the groups of packages from the top down, as the page lists them."""
    drawing = re.findall(r"```\n(.*?)```", ARCHITECTURE.read_text("utf-8"), re.DOTALL)[0]
    rows = [line.split("|") for line in drawing.splitlines() if "|" in line]
    return [(group.strip(), names.split()) for group, names in rows]


def flow_panel(width: float) -> list[str]:
    """Return the flow from a job to a report, left to right."""
    step = (width - 20) / len(FLOW)
    parts = [text(10, 22, "A run", size=14, style='font-weight="bold"')]
    middle = 'text-anchor="middle"'
    for number, (name, meaning) in enumerate(FLOW):
        x = 10 + number * step
        parts.append(box(x, 34, step - 24, 52, FILL["soft"]))
        centre = x + (step - 24) / 2
        weight = "" if number == 0 else ' font-weight="bold"'
        parts.append(text(centre, 54, name, style=middle + weight))
        for line, words in enumerate(wrapped(meaning, 20)):
            parts.append(text(centre, 69 + 12 * line, words, size=10, style=middle))
        if number:
            parts.append(arrow(x - 22, 60, x - 3, 60))
    x = 10 + 3 * step + (step - 24) / 2
    forecast = "predict: the peak of every rank, on fake tensors, before anything is built"
    parts += [arrow(x, 86, x, 104), text(x, 120, forecast, size=11, style=middle)]
    return parts


def wrapped(words: str, width: int) -> list[str]:
    """Wrap words into lines of at most a number of letters."""
    lines: list[str] = []
    for word in words.split():
        if lines and len(lines[-1]) + len(word) < width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def architecture() -> str:
    """Return the picture of a run's flow, with the packages in their groups below."""
    width, top, row = 1040.0, 168.0, 36.0
    parts = flow_panel(width)
    title = "Packages: each imports from groups below it, and from its left in its own group"
    parts.append(text(10, top - 12, title, size=14, style='font-weight="bold"'))
    groups = packages()
    for number, (group, names) in enumerate(groups):
        y = top + number * row
        parts.append(text(10, y + 19, group, style='font-weight="bold"'))
        left = 100.0
        each = (width - left - 30) / len(names)
        for place, name in enumerate(names):
            parts.append(box(left + place * each, y, each - 6, row - 8, FILL["soft"]))
            size = 11 if len(name) * 6.4 < each - 8 else 10
            centre = left + place * each + (each - 6) / 2
            parts.append(text(centre, y + 18, name, size=size, style='text-anchor="middle"'))
    parts.append(arrow(width - 16, top, width - 16, top + len(groups) * row - 8))
    return picture(width, top + len(groups) * row + 6, "The flow of a run, and the packages", parts)


DRAWINGS = {"schedules.svg": schedules, "architecture.svg": architecture}
"""What draws each file under docs/pictures/."""

if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for file_name, draw in DRAWINGS.items():
        (PICTURES / file_name).write_text(draw(), "utf-8")
