"""Your own tools: copy this file, change it, and let the policy call them. "Your own tools" in the README of
experiment_multiturn_tool_calling explains it.

python experiment_multiturn_tool_calling/train.py --tools my_tools.py

Every function defined here is a tool, unless its name begins with _. It needs a docstring, and for each parameter a
type and a line under "Args:": the policy is told nothing else. The policy reads the return value.
"""

_METRES = {"mm": 0.001, "cm": 0.01, "m": 1.0, "km": 1000.0, "inch": 0.0254, "foot": 0.3048, "mile": 1609.344}
_DENSITIES = {"water": 1000, "ice": 917, "oil": 920, "iron": 7874, "copper": 8960, "gold": 19300}  # kg per cubic metre


def convert_length(value: float, unit: str, to: str) -> str:
    """Convert a length from one unit to another.

    Args:
        value: the length
        unit: its unit: mm, cm, m, km, inch, foot or mile
        to: the unit of the result
    """
    # the policy wrote these values: check them like any untrusted input, and never eval them
    return f"{float(value) * _metres(unit) / _metres(to):.6g}"


def density(material: str) -> int:
    """Look up the density of a material in kg per cubic metre.

    Args:
        material: the name of the material, for example iron
    """
    if material not in _DENSITIES:
        raise ValueError(f"unknown material, known are {', '.join(_DENSITIES)}")  # the policy reads this sentence
    return _DENSITIES[material]


def _metres(unit: str) -> float:
    if unit not in _METRES:
        raise ValueError(f"unknown unit, known are {', '.join(_METRES)}")
    return _METRES[unit]
