"""Units of measure as (factor, dimensions), so that `18 cm^2` and `18 square centimetres` are one thing.

Policy: quantities compare after conversion (1.5 m = 150 cm); an unknown word is a label (`12 apples`) and must be the
same word, singular or plural, when both sides carry one.
"""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from typing import NamedTuple


class Unit(NamedTuple):
    """`factor` base units; `dims` sorted (base, exponent) pairs; `scale` is a number word (million) before the unit.

    A label has factor 1 and one dim `word:<text>`.
    """

    factor: Fraction
    dims: tuple[tuple[str, int], ...]
    scale: int = 1


def _f(text: str) -> Fraction:
    return Fraction(text)


# name -> (factor, ((base, exponent), ...)); further spellings after '|'
_SPEC = {
    "mm|millimeter|millimetre": ("1/1000", "m"), "cm|centimeter|centimetre": ("1/100", "m"),
    "dm|decimeter|decimetre": ("1/10", "m"), "m|meter|metre": ("1", "m"), "km|kilometer|kilometre": ("1000", "m"),
    "nm|nanometer|nanometre": ("1/1000000000", "m"),
    "in|inch|inches": ("254/10000", "m"), "ft|foot|feet": ("3048/10000", "m"), "yd|yard": ("9144/10000", "m"),
    "mi|mile": ("1609344/1000", "m"),
    "mg|milligram": ("1/1000", "g"), "g|gram|gramme": ("1", "g"), "kg|kilogram|kilo": ("1000", "g"),
    "ton|tonne": ("1000000", "g"), "lb|lbs|pound": ("45359237/100000", "g"), "oz|ounce": ("45359237/1600000", "g"),
    "ms|millisecond": ("1/1000", "s"), "s|sec|second": ("1", "s"), "min|minute": ("60", "s"),
    "h|hr|hrs|hour": ("3600", "s"), "day": ("86400", "s"), "week|wk": ("604800", "s"), "month": ("1", "month"),
    "year|yr|yrs": ("12", "month"),
    "ml|mL|milliliter|millilitre": ("1/1000000", "m3"), "L|l|liter|litre": ("1/1000", "m3"),
    "gallon|gal": ("3785411784/1000000000000", "m3"), "quart": ("946352946/1000000000000", "m3"),
    "cup": ("1", "cup"), "acre": ("1", "acre"), "hectare|ha": ("10000", "m2"),
    "dollar|usd|USD|buck": ("1", "usd"), "cent|penny|pennies": ("1/100", "usd"), "euro|EUR": ("1", "eur"),
    "pounds_sterling|GBP": ("1", "gbp"), "pence": ("1/100", "gbp"), "rupee": ("1", "inr"), "yen": ("1", "jpy"),
    "deg|degree": ("1", "deg"), "celsius|degC": ("1", "celsius"), "fahrenheit|degF": ("1", "fahrenheit"),
    "kelvin|K": ("1", "kelvin"), "rad|radian": ("1", "rad"),
    "N|newton": ("1000", "force"), "J|joule": ("1", "J"), "kJ|kilojoule": ("1000", "J"), "W|watt": ("1", "W"),
    "kW|kilowatt": ("1000", "W"), "V|volt": ("1", "V"), "A|amp|ampere": ("1", "A"), "ohm": ("1", "ohm"),
    "Hz|hertz": ("1", "Hz"), "kHz|kilohertz": ("1000", "Hz"), "Pa|pascal": ("1", "Pa"), "kPa": ("1000", "Pa"),
    "mol|mole": ("1", "mol"), "cal|calorie": ("1", "cal"), "kcal": ("1000", "cal"), "bit": ("1", "bit"),
    "byte": ("8", "bit"), "KB|kilobyte": ("8000", "bit"), "MB|megabyte": ("8000000", "bit"),
    "GB|gigabyte": ("8000000000", "bit"), "unit": ("1", ""),
}  # fmt: skip
_BASES = {"m3": (("m", 3),), "m2": (("m", 2),), "": ()}
_UNITS: dict[str, Unit] = {}
for _names, (_factor, _base) in _SPEC.items():
    for _name in _names.split("|"):
        _UNITS[_name] = Unit(_f(_factor), _BASES.get(_base, ((_base, 1),)))
_UNITS["mph"] = Unit(_f("1609344/3600000"), (("m", 1), ("s", -1)))
_UNITS["kph"] = _UNITS["kmh"] = Unit(_f("10/36"), (("m", 1), ("s", -1)))

_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}

PERCENT_WORDS = frozenset({"percent", "pct", "percentage"})
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_TOKEN = re.compile(r"[A-Za-z_]+|\^\s*\{?\s*(-?\d+)\s*\}?|\S")


def _lookup(word: str) -> Unit | None:
    if word in _UNITS:
        return _UNITS[word]
    low = word.lower()
    if len(word) > 1 and low in _UNITS:
        return _UNITS[low]
    if len(low) > 3 and low.endswith("s") and low[:-1] in _UNITS:
        return _UNITS[low[:-1]]
    return None


def is_unit_word(word: str) -> bool:
    """Whether a bare word of two letters or more names a unit (or a scale such as million)."""
    low = word.lower()
    return len(word) > 1 and (_lookup(word) is not None or low in _SCALES or low in PERCENT_WORDS or low in _POWERS)


def is_unit_letter(word: str) -> bool:
    return len(word) == 1 and word in _UNITS


def _singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 3 else word


def parse_unit(text: str) -> Unit | None:
    """Read what follows a number: `cm^2`, `m/s^2`, `square feet`, `miles per hour`, `million dollars`, `apples`.

    Returns None where it is neither a unit nor a label of plain words.
    """
    text = re.sub(r"\\(?:text|mathrm|mbox|textrm|operatorname)\s*", " ", text)
    text = re.sub(r"\\?%", " percent ", text).replace("\\cdot", " ")
    if re.search(r"[\\=<>|&]", text):
        return None
    factor, dims, labels = Fraction(1), Counter[str](), []
    last: tuple[Unit, int] | None = None
    sign = power = scale = 1

    def apply(unit: Unit, exponent: int) -> None:
        nonlocal factor
        factor *= unit.factor**exponent
        for base, e in unit.dims:
            dims[base] += e * exponent

    for match in _TOKEN.finditer(text):
        word, low = match.group(), match.group().lower()
        if match[1] or low in ("squared", "cubed"):  # an exponent behind a unit
            exponent = int(match[1]) if match[1] else 2 + (low == "cubed")
            if last is None or not 0 < abs(exponent) <= 6:
                return None
            apply(last[0], last[1] * (exponent - 1))
        elif word == "/" or low == "per" or (low in ("a", "an") and last is not None):
            sign = -1
        elif word == ")":
            sign = 1
        elif low in _POWERS:
            power = _POWERS[low]
        elif low in _SCALES and not dims and not labels:
            scale *= _SCALES[low]
        elif low in PERCENT_WORDS:
            apply(Unit(Fraction(1, 100), (("percent", 1),)), 1)
        elif word[0].isalpha():
            unit = _lookup(word)
            if unit is None:
                labels += [] if low in ("of", "and", "the", "in") else [_singular(low)]
            else:
                last = (unit, sign * power)
                apply(*last)
                power = 1
        elif word not in "*.({}-":
            return None
    if labels:
        dims["word:" + " ".join(labels)] = 1
    return Unit(factor, tuple(sorted((base, e) for base, e in dims.items() if e)), scale)
