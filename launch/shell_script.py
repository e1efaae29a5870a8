"""What a launch script would run, found by reading it: variables, arrays, conditions, arithmetic; nothing is executed.

    script = Script({"ACTOR_NUM_NODES": "2"}); script.read(text); script.commands -> list of words per command

Understood: NAME=value, export, ${X:-y} and its relatives, $((...)), arrays and +=(...), "${A[@]}", $(seq ...), line
continuations, comments, if/elif/else with [ ] and [[ ]], redirections. Everything else that would need a shell, such as
$(date), stays in the words as it stands. Left out on purpose: functions, loops, here-documents.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator
from typing import Any

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)")
PARAMETER = re.compile(r"(\w+)(\[[@*]\])?(?:(:?[-=?+])(.*))?", re.DOTALL)
REDIRECTION = re.compile(r"\d*(?:>>|>&|>|<<<|<)|&>")
ARITHMETIC: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: (a // b) if a * b >= 0 else -(-a // b),  # towards zero
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
COMPARISONS: dict[str, Any] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


class Script:
    """Variables and commands of the scripts that were read, in order. `given` wins over plain ${X:-default}s."""

    def __init__(self, given: dict[str, str] | None = None):
        self.variables: dict[str, str | list[str]] = dict(given or {})
        self.exported: dict[str, str] = {}
        self.commands: list[list[str]] = []
        self.remarks: list[str] = []
        self.branches: list[list[bool]] = []
        """Open ifs, outermost first: [this branch counts, one branch has counted]."""

    def read(self, text: str) -> None:
        """ValueError, with the line, for an unfinished quote or bracket."""
        for words in statements(text):
            self._statement(words)

    def _statement(self, words: list[str]) -> None:
        keyword, rest = words[0], words[1:]
        if keyword in ("if", "elif"):
            if keyword == "if":
                self.branches.append([False, not self._counts()])  # inside a dead branch no branch counts
            branch = self.branches[-1]
            branch[0] = not branch[1] and self._condition(rest)
            branch[1] = branch[1] or branch[0]
        elif keyword == "else" and self.branches:
            branch = self.branches[-1]
            branch[:] = [not branch[1], True]
        elif keyword == "fi" and self.branches:
            self.branches.pop()
        if keyword in ("then", "else", "do", "{", "time", "!"):
            if rest:
                self._statement(rest)
        elif keyword not in ("if", "elif", "fi", "done", "}") and self._counts():
            self._simple(words)

    def _counts(self) -> bool:
        return all(branch[0] for branch in self.branches)

    def _condition(self, words: list[str]) -> bool:
        """A comparison in [ ] or [[ ]]; anything else counts as false, with a remark."""
        inner = [" ".join(self.expand(word)) for word in words if word not in ("[", "[[", "]", "]]")]
        if len(inner) == 3 and "$" not in inner[0] + inner[2]:
            left, sign, right = inner
            if sign in COMPARISONS and left.lstrip("-").isdigit() and right.lstrip("-").isdigit():
                return bool(COMPARISONS[sign](int(left), int(right)))
            if sign in ("==", "=", "!="):
                return (left == right) == (sign != "!=")
        if len(inner) == 2 and inner[0] in ("-z", "-n"):
            return (inner[1] == "") == (inner[0] == "-z")
        self.remarks.append(f"condition taken as false: {' '.join(words)}")
        return False

    def _simple(self, words: list[str]) -> None:
        exports = words[0] in ("export", "local", "declare", "readonly")
        rest = words[1:] if exports else words
        assigned = []
        while rest and (match := ASSIGNMENT.match(rest[0])):
            name, sign = match.groups()
            self._assign(name, sign, rest[0][match.end() :])
            assigned, rest = [*assigned, name], rest[1:]
        if exports or rest:
            self.exported |= {name: _text(self.variables[name]) for name in assigned}
        if rest and not exports:
            self.commands.append([text for word in rest for text in self.expand(word)])

    def _assign(self, name: str, sign: str, raw: str) -> None:
        value: str | list[str]
        if raw.startswith("("):
            value = [text for words in statements(raw[1:-1]) for word in words for text in self.expand(word)]
            before = self.variables.get(name, [])
            self.variables[name] = (
                [*([before] if isinstance(before, str) else before), *value] if sign == "+=" else value
            )
            return
        value = " ".join(self.expand(f'"{raw}"' if '"' not in raw and "'" not in raw else raw))
        self.variables[name] = _text(self.variables.get(name, "")) + value if sign == "+=" else value
        self._suspect(name, raw, value)

    def _suspect(self, name: str, raw: str, value: str) -> None:
        """1204 has the digits of 1024: such a number is kept, and told."""
        for number in re.findall(r"\d{3,}", raw if "$((" in raw else ""):
            meant = [2**k for k in range(7, 20) if sorted(str(2**k)) == sorted(number) and str(2**k) != number]
            if meant:
                self.remarks.append(
                    f"{name}={raw} is {value} and is kept; was {meant[0]} meant where {number} is written?"
                )

    def expand(self, raw: str) -> list[str]:
        """A word with its quotes as the words it stands for; one unquoted, empty expansion stands for none."""
        fields, is_quoted, position = [""], False, 0
        while position < len(raw):
            end = _piece(raw, position)
            piece, position = raw[position:end], end
            if piece[0] == "'":
                values, is_quoted = [piece[1:-1]], True
            elif piece[0] == '"':
                values, is_quoted = self._in_quotes(piece[1:-1]), True
            elif piece[0] == "\\":
                values = [piece[1:]]
            elif piece[0] == "$":
                values = self._value(piece)
                if "[@]" not in piece:  # elements of an array stay whole, which unquoted ones in bash do not
                    values = [word for value in values for word in value.split()]
            else:
                values = [piece]
            if values:
                fields = [*fields[:-1], fields[-1] + values[0], *values[1:]]
        return fields if is_quoted or fields != [""] else []

    def _in_quotes(self, text: str) -> list[str]:
        fields, position = [""], 0
        while position < len(text):
            end = _piece(text, position, quoted=True)
            piece, position = text[position:end], end
            values = self._value(piece) if piece[0] == "$" else [piece[1:] if piece[0] == "\\" else piece]
            if values:
                fields = [*fields[:-1], fields[-1] + values[0], *values[1:]]
        return fields

    def _value(self, piece: str) -> list[str]:
        """What `$NAME`, `${...}`, `$((...))` or `$(...)` stands for."""
        if piece.startswith("$(("):
            return [str(self._arithmetic(piece[3:-2]))]
        if piece.startswith("$("):
            words = piece[2:-1].split()
            if words[:1] == ["seq"] and all(word.isdigit() for word in words[1:]) and 2 <= len(words) <= 4:
                *start, last = map(int, words[1:])
                first, step = (*start, 1)[:2] if start else (1, 1)
                return [" ".join(map(str, range(first, last + 1, max(1, step))))]
            return [piece.replace(" ", "\u00a0")]  # stays one word
        match = PARAMETER.fullmatch(piece[2:-1] if piece.startswith("${") else piece[1:])
        if match is None:
            return [piece]
        return self._parameter(*match.groups())

    def _parameter(self, name: str, is_array: str | None, sign: str | None, word: str | None) -> list[str]:
        value = self.variables.get(name)
        is_set = bool(value) if sign and sign.startswith(":") else value is not None
        if sign and sign[-1] == "+":
            return self.expand(word or "") if is_set else []
        if not is_set and sign and sign[-1] in "-=":
            text = " ".join(self.expand(word or ""))
            if sign[-1] == "=":
                self.variables[name] = text
            return [text]
        if value is None:
            self.remarks.append(f"{name} is not set in the script; counted as empty")
        if isinstance(value, list):
            return value if is_array else value[:1]
        return [value or ""] if value or not is_array else []

    def _arithmetic(self, text: str) -> int:
        """Integers, names, + - * / % and brackets. ValueError for more."""
        plain = "".join(self._in_quotes(re.sub(r"(?<![\w$])\s+|\s+(?![\w$])", "", text)))
        try:
            return self._number(ast.parse(plain.strip(), mode="eval").body)
        except (SyntaxError, KeyError, RecursionError, ZeroDivisionError):
            raise ValueError(f"$(({text})) is not integer arithmetic that can be read") from None

    def _number(self, node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            return int(_text(self.variables.get(node.id, "0")) or 0)
        if isinstance(node, ast.BinOp):
            return int(ARITHMETIC[type(node.op)](self._number(node.left), self._number(node.right)))
        if isinstance(node, ast.UnaryOp):
            return int(ARITHMETIC[type(node.op)](self._number(node.operand)))
        raise KeyError(type(node))


def _text(value: str | list[str]) -> str:
    return value if isinstance(value, str) else " ".join(value)


def statements(text: str) -> Iterator[list[str]]:
    """Raw words, quotes included, of each simple command; redirections and what separates commands are gone."""
    words: list[str] = []
    position, drops_next = 0, False
    while position < len(text):
        if text.startswith("\\\n", position):
            position += 2
        elif text[position] == "#":
            end = text.find("\n", position)
            position = len(text) if end < 0 else end
        elif match := REDIRECTION.match(text, position):
            position, drops_next = match.end(), True
        elif text[position] in "\n;|&":
            if words:
                yield words
            words, drops_next, position = [], False, position + 1
        elif text[position].isspace():
            position += 1
        else:
            end = _word(text, position)
            if not drops_next:
                words.append(text[position:end])
            position, drops_next = end, False
    if words:
        yield words


def _word(text: str, position: int) -> int:
    """End of the word that begins here."""
    while position < len(text) and not (text[position].isspace() or text[position] in ";|&<>"):
        if text.startswith("\\\n", position):
            break
        position = _piece(text, position)
    return position


def _piece(text: str, start: int, quoted: bool = False) -> int:
    """End of the quoted, escaped, substituted or bracketed piece that begins here, or of one plain character."""
    first, two = text[start], text[start : start + 2]
    if first == "\\":
        return min(start + 2, len(text))
    if two in ("$(", "${"):
        return _closing(text, start + 2, ")" if two == "$(" else "}", start)
    if first == "$" and (match := re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?!$])").match(text, start)):
        return match.end()
    if quoted:
        return start + 1
    if first in "'`":
        end = text.find(first, start + 1)
        return end + 1 if end > 0 else _unfinished(text, start)
    if first in '"(':
        return _closing(text, start + 1, '"' if first == '"' else ")", start)
    return start + 1


def _closing(text: str, position: int, closing: str, start: int) -> int:
    while position < len(text):
        if text[position] == closing:
            return position + 1
        if text[position] == "#" and closing == ")" and text[position - 1].isspace():
            position = text.find("\n", position) if "\n" in text[position:] else len(text)
        else:
            position = _piece(text, position, quoted=closing in '"}')
    return _unfinished(text, start)


def _unfinished(text: str, start: int) -> int:
    line = text.count("\n", 0, start) + 1
    raise ValueError(f"line {line}: {text[start : start + 30].splitlines()[0]!r} is never closed")
