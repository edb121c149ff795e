"""Scaled rotary positions: what ``config.json`` says of them, and the frequencies that follow.

``linear`` divides every frequency, ``llama3`` and ``yarn`` the low ones. ``dynamic`` and ``longrope`` depend on the
length of a text: within the original context, ``dynamic`` changes nothing, and ``longrope`` has its short factors.
Longer texts are refused, since their angles would change those of the tokens before.

Source: Grattafiori et al. 2024 (arXiv 2407.21783) for llama3, Peng et al. 2023 (arXiv 2309.00071) for yarn, Ding et al.
2024 (arXiv 2402.13753) for longrope; ``modeling_rope_utils.py`` of ``transformers``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from math import ceil, floor, log, pi, sqrt
from typing import Any

import numpy as np

from ..errors import UserError

ORIGINAL, PART = "original_max_position_embeddings", "partial_rotary_factor"
SCALINGS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("factor", ORIGINAL, "beta_fast", "beta_slow", "attention_factor"),
    "longrope": ("short_factor", "long_factor", ORIGINAL, "attention_factor"),
}
"""The numbers of each scaling of positions, by their keys in ``config.json``."""
KEYS = {key: f"rope_{key}" for keys in SCALINGS.values() for key in keys} | {ORIGINAL: "rope_original_positions"}
"""The fields of these keys."""
OPTIONAL = {"beta_fast", "beta_slow", "attention_factor"}
"""Keys that a scaling may lack: the fields have the defaults of ``transformers``."""


def check(c: Any) -> None:
    """Refuse numbers of a scaling that do not fit each other, or that it does not read."""
    if c.rope_type not in SCALINGS:
        raise UserError(f"model: rope_type is {c.rope_type[:60]!r}; expected {', '.join(SCALINGS)}")
    for f in fields(c):
        given, read = getattr(c, f.name), [KEYS[key] for key in SCALINGS[c.rope_type]]
        if f.name in KEYS.values() and f.name not in read and given != f.default:
            more = "so leave it out or name the rope_type"
            raise UserError(f"model: {f.name} is {given}; rope_type = {c.rope_type!r} does not read it, {more}")
    if c.rope_low_freq_factor >= c.rope_high_freq_factor:
        raise UserError(
            f"model: rope_low_freq_factor = {c.rope_low_freq_factor}; expected less than "
            f"rope_high_freq_factor = {c.rope_high_freq_factor}"
        )
    if c.rope_type in ("yarn", "longrope") and not (c.rope_theta > 1 and c.rope_original_positions > 1):
        raise UserError(
            f"model: rope_theta = {c.rope_theta}, rope_original_positions = {c.rope_original_positions}; expected more "
            f"than 1, since {c.rope_type} has their logarithms"
        )
    if c.rope_type == "longrope":
        for name in ("rope_short_factor", "rope_long_factor"):
            if len(getattr(c, name)) != c.rotary_dim // 2 or not all(getattr(c, name)):
                raise UserError(
                    f"model: {name} has {len(getattr(c, name))} numbers; expected {c.rotary_dim // 2} above 0, one for "
                    "each pair of channels that rotates"
                )


def scaled(c: Any, frequencies: np.ndarray) -> np.ndarray:
    """Scale the inverse frequencies (rotary_dim / 2,) of a model's rotary positions, in float32."""
    found: np.ndarray = frequencies
    n, factor = len(frequencies), np.float32(c.rope_factor)
    powers = np.float32(c.rope_theta) ** (np.arange(0, 2 * n, 2, dtype=np.float32) / np.float32(2 * n))
    if c.rope_type == "linear":
        found = frequencies / factor
    if c.rope_type == "longrope":
        found = np.float32(1) / (np.array(c.rope_short_factor, np.float32) * powers)
    if c.rope_type == "yarn":
        first, last = (
            2 * n * log(c.rope_original_positions / (turns * 2 * pi)) / (2 * log(c.rope_theta))
            for turns in (c.rope_beta_fast, c.rope_beta_slow)
        )
        low, high = max(floor(first), 0), min(ceil(last), 2 * n - 1)
        ramp = (np.arange(n, dtype=np.float32) - np.float32(low)) / np.float32((high - low) or 0.001)
        kept = np.float32(1) - np.clip(ramp, 0, 1)
        slow = np.float32(1) / (factor * powers)
        found = slow * (np.float32(1) - kept) + frequencies * kept
    if c.rope_type == "llama3":
        low, high = c.rope_low_freq_factor, c.rope_high_freq_factor
        wavelength = np.float32(2 * pi) / frequencies
        long, short = c.rope_original_positions / low, c.rope_original_positions / high
        slow = frequencies / factor
        smooth = (np.float32(c.rope_original_positions) / wavelength - np.float32(low)) / np.float32(high - low)
        between = (np.float32(1) - smooth) * slow + smooth * frequencies
        found = np.where(wavelength > long, slow, np.where(wavelength < short, frequencies, between))
    return found


def amplitude(c: Any) -> float:
    """Return what the cosines and sines of a model's rotary positions are multiplied by."""
    if c.rope_attention_factor is not None:
        return float(c.rope_attention_factor)
    if c.rope_type == "yarn" and c.rope_factor > 1:
        return 0.1 * log(c.rope_factor) + 1
    if c.rope_type == "longrope" and (longer := c.max_position_embeddings / c.rope_original_positions) > 1:
        return sqrt(1 + log(longer) / log(c.rope_original_positions))
    return 1.0


def rope_of(given: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Read the scaling of positions from ``rope_parameters``, or from ``rope_scaling`` of earlier versions.

    Raises
    ------
    UserError
        For a scaling that is not computed, one that lacks a number, and two that differ.
    """
    found = {key: given[key] for key in ("rope_parameters", "rope_scaling") if given.get(key)}
    read = [_rope(key, rope, given, config) for key, rope in found.items()] or [{}]
    if read[0] != read[-1]:
        raise UserError("rope_parameters and rope_scaling differ; remove the one that is wrong")
    return read[0]


def _rope(key: str, rope: Any, given: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Read the scaling of positions under a key."""
    if not isinstance(rope, dict):
        raise UserError(f"{key} is {repr(rope)[:60]}; expected an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its first name
    if kind not in tuple(SCALINGS):
        raise UserError(f"{key} has the rope_type {repr(kind)[:60]}; expected {', '.join(SCALINGS)}")
    part = {n: rope[n] for n in [PART] if rope.get(n) is not None}
    if part and PART not in vars(config) and part[PART] != 1:
        raise UserError(f"{key}: {PART} is {repr(part[PART])[:60]}; expected 1.0")
    known = {"rope_type", "type", "rope_theta", PART, *SCALINGS[kind]}
    known |= {*SCALINGS["llama3"], "finetuned"}  # which may stand there unread
    if other := sorted(name for name in rope.keys() - known if rope[name] is not None):
        raise UserError(f"{key} has {other[0][:60]!r}, which cpuopt does not compute; leave it out")
    there = {ORIGINAL: config.max_position_embeddings}
    there |= {n: x for n, x in rope.items() if x is not None or n not in OPTIONAL}
    there |= {n: given[n] for n in [ORIGINAL] if n in given}  # at the top level it precedes
    if lacking := [name for name in SCALINGS[kind] if name not in there and name not in OPTIONAL]:
        raise UserError(f"{key} has the rope_type {kind!r} and lacks {lacking[0]!r}")
    if kind == "longrope" and rope.get("factor") not in (None, config.max_position_embeddings / there[ORIGINAL]):
        raise UserError(f"{key}: factor is {repr(rope['factor'])[:60]}; expected max_position_embeddings / {ORIGINAL}")
    numbers = {KEYS[name]: there[name] for name in SCALINGS[kind] if name in there}
    numbers |= {"rope_type": kind, "rope_theta": rope.get("rope_theta", config.rope_theta)}
    return numbers | {n: x for n, x in part.items() if n in vars(config)}


def rope_json(c: Any) -> dict[str, Any]:
    """Return the scaling of a model's positions as ``config.json`` has it, without the base."""
    rope = {"rope_type": c.rope_type}
    rope |= {name: getattr(c, KEYS[name]) for name in SCALINGS[c.rope_type]}
    rope |= {PART: getattr(c, PART)} if PART in vars(c) else {}
    return {there: list(x) if isinstance(x, tuple) else x for there, x in rope.items() if x is not None}
