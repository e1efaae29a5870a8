"""The book-keeping of a translation: options as written, the recipe so far, and what became of each option."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Translation:
    given: Mapping[str, str]
    """Options of the script; a flag without a value is "true"."""
    environment: Mapping[str, str] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    fates: dict[str, tuple[str, str]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def get(self, name: str, default: str = "") -> str:
        return self.given.get(name, default)

    def number(self, name: str, default: float) -> Any:
        """ValueError names the option."""
        text = self.given.get(name, str(default))
        try:
            return int(text)
        except ValueError:
            try:
                return float(text)
            except ValueError:
                raise ValueError(f"{name} = {text!r} is not a number; is a variable of the script missing?") from None

    def on(self, name: str, default: bool = False) -> bool:
        return self.given.get(name, str(default)).lower() in ("true", "1", "yes")

    def put(self, target: str, value: Any, *origins: str) -> None:
        """Set an option of the recipe; those of `origins` that were given are translated."""
        self.recipe[target] = value
        self.translated(f"{target} = {value}", *origins)

    def copy(self, name: str, target: str, convert: Callable[[str], Any] | None = None) -> None:
        """One option to one option, when given."""
        if name in self.given:
            self.put(target, convert(self.given[name]) if convert else self.number(name, 0), name)

    def translated(self, text: str, *names: str) -> None:
        self._tell("translated", text, names)

    def unnecessary(self, name: str, reason: str) -> None:
        self._tell("unnecessary", reason, (name,))

    def unsupported(self, name: str, reason: str) -> None:
        self._tell("unsupported", reason, (name,))

    def _tell(self, kind: str, text: str, names: tuple[str, ...]) -> None:
        for name in names:
            if name in self.given or name.startswith(("$", "command ")):
                self.fates[name] = (kind, text)

    def drop(self, target: str, reason: str) -> None:
        """Take an option out of the recipe again; what was translated into it is unnecessary."""
        value = self.recipe.pop(target)
        for name, fate in self.fates.items():
            if fate == ("translated", f"{target} = {value}"):
                self.unnecessary(name, reason)

    def choose(self, name: str, target: str, known: Mapping[str, str], default: str = "") -> None:
        """A named choice; one that we lack is unsupported and leaves the recipe's default."""
        value = self.get(name, default)
        if value in known:
            self.put(target, known[value], name)
        elif value:
            self.unsupported(name, f"{value!r} does not exist here; {target} keeps its default")
            self.remarks.append(f"{name} = {value!r} has no counterpart: the recipe trains something else")


def flag(text: str) -> bool:
    return text.lower() in ("true", "1", "yes")


def unbracket(text: str) -> list[str]:
    """'a', "['a','b']" or "[a, b]" as a list."""
    return [part.strip().strip("'\"") for part in text.strip().strip("[]").split(",") if part.strip()]
