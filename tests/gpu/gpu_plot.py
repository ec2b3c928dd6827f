"""The plot of tests/gpu/run: training by device memory, and the ratios of the part "speed"."""

from __future__ import annotations

import math
import pathlib
from typing import NamedTuple
from xml.sax.saxutils import escape

from gpu_parts import Result, Value

COLORS = {"torch": "#d95f02", "megatron": "#7570b3", "optstate": "#1b9e77"}
WIDTH, DOTS_LEFT, DOTS_RIGHT, DOTS_HEIGHT = 860, 90, 830, 320
BARS_LEFT, BARS_RIGHT, BAR_STEP = 240, 700, 22
LABEL_STEP = 14


class Dot(NamedTuple):
    name: str
    held: float
    speed: float


def write_plot(results: list[Result], machine: dict[str, str], path: pathlib.Path) -> None:
    """Writes an SVG that needs no other file; none is left where nothing was measured."""
    values = {one.name: one.values for one in results}
    dots = [
        Dot(one.name[len("Training/") :], one.numbers["held_GB"], one.numbers["tokens_per_s"])
        for one in values.get("training", [])
        if one.name.startswith("Training/") and {"held_GB", "tokens_per_s"} <= one.numbers.keys()
    ]
    bars = [one for one in values.get("speed", []) if math.isfinite(one.ratio)]
    path.unlink(missing_ok=True)  # an earlier run's
    if not dots and not bars:
        return
    device = machine.get("device", "none").split(",")[0]
    shapes = [text(20, 28, "Speed of training and of updates", size=17)]
    shapes.append(text(20, 48, f"device: {device}", color="#555"))
    height = draw_dots(dots, 60, shapes) if dots else 60
    height = draw_bars(bars, height, shapes) if bars else height
    size = f'width="{WIDTH}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    page = f'<rect {size} fill="#fff"/>'
    path.write_text("\n".join([head, page, *shapes, "</svg>\n"]), encoding="utf-8")


def draw_dots(dots: list[Dot], top: int, shapes: list[str]) -> int:
    """Draws a dot for each way of training; returns where the next panel begins."""
    shapes.append(text(20, top + 24, "Training: tokens/s by device memory held", size=14))
    top += 52
    bottom = top + DOTS_HEIGHT
    x_ticks, y_ticks = ticks(max(dot.held for dot in dots)), ticks(max(dot.speed for dot in dots))

    def x_of(held: float) -> float:
        return DOTS_LEFT + held / x_ticks[-1] * (DOTS_RIGHT - DOTS_LEFT)

    def y_of(speed: float) -> float:
        return bottom - speed / y_ticks[-1] * DOTS_HEIGHT

    for tick in x_ticks:
        shapes.append(text(x_of(tick), bottom + 17, f"{tick:.10g}", "middle"))
    for tick in y_ticks:
        shapes.append(line(DOTS_LEFT, y_of(tick), DOTS_RIGHT, y_of(tick)))
        shapes.append(text(DOTS_LEFT - 8, y_of(tick) + 4, f"{tick:,.10g}", "end"))
    shapes.append(text(DOTS_LEFT - 8, top - 12, "tokens/s", "end"))
    shapes.append(text(DOTS_RIGHT, bottom + 36, "device memory held between steps, GB", "end"))
    label_y: float = top - LABEL_STEP
    for bound in [y_of(dot.speed) for dot in dots if dot.name == "none"]:
        shapes.append(line(DOTS_LEFT, bound, DOTS_RIGHT, bound, "#333", 'stroke-dasharray="4 3"'))
        shapes.append(text(DOTS_LEFT + 6, bound - 5, "without an optimizer: the upper bound"))
        label_y = bound
    ways = sorted((dot for dot in dots if dot.name != "none"), key=lambda dot: -dot.speed)
    for index, way in enumerate(ways):
        x, y = x_of(way.held), y_of(way.speed)
        # The labels below it need their room, too.
        lowest = bottom - 4 - LABEL_STEP * (len(ways) - 1 - index)
        label_y = min(max(y, label_y + LABEL_STEP), lowest)
        color = next((COLORS[who] for who in COLORS if way.name.startswith(who)), "#777")
        side, anchor = (1, "start") if x < (DOTS_LEFT + DOTS_RIGHT) / 2 else (-1, "end")
        shapes.append(line(x, y, x + 18 * side, label_y, color))
        shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{color}"/>')
        shapes.append(text(x + 21 * side, label_y + 4, way.name, anchor, color))
    return bottom + 56


def draw_bars(bars: list[Value], top: int, shapes: list[str]) -> int:
    """Draws a bar for each ratio; returns where the picture ends."""
    shapes.append(text(20, top + 24, "Updates and copies: speed as a ratio to a baseline", size=14))
    top += 44
    bottom = top + BAR_STEP * len(bars)
    scale = ticks(max(max(bar.ratio, bar.goal or 1.0) for bar in bars))
    per_ratio = (BARS_RIGHT - BARS_LEFT) / scale[-1]
    for tick in scale:
        x = BARS_LEFT + tick * per_ratio
        shapes += [line(x, top, x, bottom), text(x, bottom + 17, f"{tick:.10g}", "middle")]
    for y, bar in zip(range(top, bottom, BAR_STEP), bars):
        color = "#c0392b" if bar.is_missed else "#4878a8"
        size = f'width="{bar.ratio * per_ratio:.1f}" height="{BAR_STEP - 8}"'
        shapes.append(f'<rect x="{BARS_LEFT}" y="{y + 4}" {size} fill="{color}"/>')
        shapes.append(text(BARS_LEFT - 8, y + 15, bar.name, "end"))
        goal = ""
        if bar.goal is not None:
            x, goal = BARS_LEFT + bar.goal * per_ratio, f" (goal: {bar.goal:g})"
            shapes.append(line(x, y + 1, x, y + BAR_STEP - 1, "#000", 'stroke-width="2"'))
        shapes.append(text(BARS_RIGHT + 12, y + 15, f"{bar.ratio:.2f}{goal}"))
    beside = (
        "a copy on the device (Update), copies one by one (Copies), the CPU alone (Hybrid), "
        "torch's AdamW (BesideTorch)"
    )
    shapes.append(text(BARS_RIGHT, bottom + 36, f"1 is as fast as {beside}", "end"))
    return bottom + 52


def ticks(most: float) -> list[float]:
    """Returns round numbers from 0 to `most` or beyond."""
    most = most if most > 0 else 1.0
    power = 10.0 ** math.floor(math.log10(most / 5))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor * 5 >= most)
    return [step * index for index in range(math.ceil(most / step - 1e-9) + 1)]


def text(
    x: float, y: float, words: str, anchor: str = "start", color: str = "#222", size: int = 12
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{color}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, color: str = "#ddd", more: str = "") -> str:
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {place} stroke="{color}" {more}/>'
