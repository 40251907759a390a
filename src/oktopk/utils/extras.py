# SPDX-License-Identifier: Apache-2.0
"""Packages that only some commands need: checks that they are there, and how to install them."""

from __future__ import annotations

import importlib.util

EXTRAS = {
    **dict.fromkeys(("soundfile", "espeakng_loader", "jiwer"), "train"),
    **dict.fromkeys(("tensorboard", "PIL", "sklearn"), "train"),
    **dict.fromkeys(("rich", "plotly"), "view"),
    **dict.fromkeys(("accelerate", "transformers", "lightning", "ray", "ignite"), "integrations"),
    "optuna": "sweep",
    "matplotlib": "plots",
    "shtab": "completion",
}
"""Which extra of this project installs a package. `train` and `sweep` contain `view`."""

_TRAIN = ("tensorboard", "rich", "plotly")
NEEDED = {
    "train": _TRAIN,
    "compare": _TRAIN,
    "sweep": (*_TRAIN, "optuna", "sklearn"),
    "report": ("plotly",),
    "watch": ("rich",),
    "data": ("soundfile",),
    "completion": ("shtab",),
}
"""Which packages each command needs. They are checked before the command does anything."""


class MissingPackageError(ImportError):
    """A package of an extra is not installed; the message says how to install it."""


def require(what: str, *packages: str) -> None:
    """Raise `MissingPackageError` if some of the packages are not installed; `what` needs them."""
    missing = [name for name in packages if not _installed(name)]
    if missing:
        raise missing_packages(what, *missing)


def missing_packages(what: str, *missing: str) -> MissingPackageError:
    """Return the error that says what to install."""
    needed = dict.fromkeys(EXTRAS.get(name, "train") for name in missing)
    extras = ",".join(name for name in needed if name != "view" or len(needed) == 1)
    verb = "is" if len(missing) == 1 else "are"
    names = " and ".join(filter(None, [", ".join(missing[:-1]), missing[-1]]))
    return MissingPackageError(
        f"{what} needs {names}, which {verb} not installed: pip install 'oktopk[{extras}]'"
    )


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # a package that was made unavailable in this process
        return False
