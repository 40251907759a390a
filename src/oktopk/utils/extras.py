"""Packages that only some commands need: checks that they are there, and how to install them."""

from __future__ import annotations

import importlib.util

EXTRAS = {
    **dict.fromkeys(("soundfile", "espeakng_loader", "jiwer"), "train"),
    **dict.fromkeys(("tensorboard", "rich", "plotly", "PIL", "sklearn"), "train"),
    **dict.fromkeys(("accelerate", "transformers", "lightning", "ray", "ignite"), "integrations"),
    "optuna": "sweep",
    "matplotlib": "plots",
}
"""Which extra of this project installs a package."""

_TRAIN = ("tensorboard", "rich", "plotly")
NEEDED = {
    "train": _TRAIN,
    "compare": _TRAIN,
    "sweep": (*_TRAIN, "optuna", "sklearn"),
    "report": ("plotly",),
    "watch": ("rich",),
    "data": ("soundfile",),
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
    extras = ",".join(dict.fromkeys(EXTRAS.get(name, "train") for name in missing))
    verb = "is" if len(missing) == 1 else "are"
    return MissingPackageError(
        f"{what} needs {' and '.join(missing)}, which {verb} not installed: "
        f"pip install 'oktopk[{extras}]'"
    )


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # a package that was made unavailable in this process
        return False
