"""The shades of the matrix in both themes, each with the digits, black or white, that contrast more with it."""

from __future__ import annotations

SHADES = 9
THEMES = {"light": ("#ffffff", "#1c5cab"), "dark": ("#1e1e1c", "#4a94ea")}
"""The colours of a time of zero, which is that of a card, and of the longest."""
INKS = ("#000000", "#ffffff")


def shades() -> str:
    """Write the rules of the classes ``s0`` to ``s9``."""
    rules = []
    for i in range(SHADES + 1):
        pairs = [colours(theme, i) for theme in THEMES]
        back, ink = (f"light-dark({', '.join(of)})" for of in zip(*pairs, strict=True))
        rules.append(f".s{i} {{ background: {back}; color: {ink}; }}\n")
    return "".join(rules)


def colours(theme: str, shade: int) -> tuple[str, str]:
    """Return the background of a shade and the colour of its digits."""
    ends = [[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in THEMES[theme]]
    part = 0.03 + 0.97 * shade / SHADES
    back = "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(*ends, strict=True))
    return back, max(INKS, key=lambda ink: contrast(ink, back))


def contrast(a: str, b: str) -> float:
    """Return the contrast of two colours after WCAG 2.1: 1 for equal ones, 21 for black on white."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour such as ``#1c5cab``."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
