# SPDX-License-Identifier: Apache-2.0
"""A grammar of sentences like those in AN4: digits, dates, spelled names, commands."""

# ruff: noqa: SIM905 (lists of words are easier to read as text)

from __future__ import annotations

from collections.abc import Callable

from numpy.random import Generator

DIGITS = "ZERO ONE TWO THREE FOUR FIVE SIX SEVEN EIGHT NINE".split()
TEENS = "TEN ELEVEN TWELVE THIRTEEN FOURTEEN FIFTEEN SIXTEEN SEVENTEEN EIGHTEEN NINETEEN".split()
TENS = "TWENTY THIRTY FORTY FIFTY SIXTY SEVENTY EIGHTY NINETY".split()
MONTHS = (
    "JANUARY FEBRUARY MARCH APRIL MAY JUNE JULY AUGUST SEPTEMBER OCTOBER NOVEMBER DECEMBER".split()
)
ORDINALS = (
    "FIRST SECOND THIRD FOURTH FIFTH SIXTH SEVENTH EIGHTH NINTH TENTH ELEVENTH TWELFTH THIRTEENTH "
    "FOURTEENTH FIFTEENTH SIXTEENTH SEVENTEENTH EIGHTEENTH NINETEENTH TWENTIETH"
).split()
COMMANDS = "YES NO GO HELP STOP START REPEAT".split()
NAMES = (
    "ANNA BEN CLARA DAVID EMMA FRANK GRACE HUGO IRIS JACK KATE LEON MARIA NINA OSCAR PAULA QUINN "
    "ROSE SAM TINA URSULA VICTOR WENDY XENIA YVES ZOE ADAMS BAKER COX DIXON EVANS FOX GRAY HILL "
    "JONES KLEIN LOPEZ MOORE NOVAK OWENS PRICE RUIZ SMITH TAYLOR VANCE WOOD YOUNG AKRON BOSTON "
    "DALLAS ERIE HILO JOLIET LIMA MIAMI OMAHA PITTSBURGH RENO TULSA WACO"
).split()
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def sentence(chance: Generator) -> str:
    """A random sentence. Zero is never read as "oh", which would sound like the letter O."""
    return RULES[int(chance.choice(len(RULES), p=WEIGHTS))][1](chance)


def digits(chance: Generator, shortest: int = 2, longest: int = 5) -> str:
    """A house number, a zip code, a part of a telephone number."""
    return " ".join(_pick(chance, DIGITS) for _ in range(chance.integers(shortest, longest + 1)))


def number(chance: Generator) -> str:
    """FORTY SEVEN, TWELVE, SIXTY."""
    tens, unit = _pick(chance, TENS), _pick(chance, DIGITS[1:])
    return _pick(chance, [f"{tens} {unit}", f"{tens} {unit}", tens, _pick(chance, TEENS)])


def date(chance: Generator) -> str:
    """JANUARY TWENTY SEVENTH, sometimes with a year; MAY SEVEN."""
    day = _pick(chance, ORDINALS)
    if chance.random() < 0.3:
        day = _pick(chance, ["TWENTY", "TWENTY", "THIRTY"]) + " "
        day += "FIRST" if day == "THIRTY " else _pick(chance, ORDINALS[:9])
    year = f" NINETEEN {number(chance)}" if chance.random() < 0.2 else ""
    return f"{_pick(chance, MONTHS)} {day}{year}"


def spelled(chance: Generator) -> str:
    """A name, letter by letter."""
    return " ".join(_pick(chance, NAMES))


def entered(chance: Generator) -> str:
    """ENTER SIX TWO FOUR, ENTER NINETY SEVEN."""
    return "ENTER " + _pick(chance, [digits, number])(chance)


def erased(chance: Generator) -> str:
    """RUBOUT T M N SEVEN: letters that make no word."""
    letters = " ".join(_pick(chance, LETTERS) for _ in range(chance.integers(2, 5)))
    return f"{_pick(chance, ['RUBOUT', 'ERASE'])} {letters} {digits(chance, 1, 2)}"


def command(chance: Generator) -> str:
    """GO."""
    return _pick(chance, COMMANDS)


def _pick(chance: Generator, items):  # noqa: ANN001, ANN202 - any sequence, its element
    return items[int(chance.integers(len(items)))]


# Weights in percent: many sentences that are quick to learn, and enough letters to tell apart.
RULES: list[tuple[int, Callable[[Generator], str]]] = [
    (12, command),
    (20, digits),
    (8, number),
    (20, date),
    (16, entered),
    (14, spelled),
    (10, erased),
]
WEIGHTS = [weight / 100 for weight, _ in RULES]
