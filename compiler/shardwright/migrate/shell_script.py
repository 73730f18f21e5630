"""Read the commands of a shell script without running anything.

Assignments are expanded where every branch of the script gives the same value. What only the shell
knows ($1, $(hostname), a variable of another file) stays as it is written.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

MOST_WORDS = 4096
MOST_CHARACTERS = 512 * 1024
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_EXPANSION = re.compile(
    r"\$\(\((?P<sum>[^()]*(?:\([^()]*\)[^()]*)*)\)\)"
    r"|\$\{(?P<braced>\w+)(?:\[[@*]\])?(?P<default>:?-[^{}$`]*)?\}|\$(?P<plain>[A-Za-z_]\w*)"
)
_EXPR = re.compile(r"\$\(expr ([^()]*)\)|`expr ([^`()]*)`")
_WHOLE_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_DIRECTIVE = re.compile(r"^#SBATCH[ \t]+(-[^\s=]+)(?:[= \t]+(\S+))?", re.MULTILINE)
_OPENING = frozenset({"if", "for", "while", "until", "case"})
_CLOSING = frozenset({"fi", "done", "esac"})
_KEYWORDS = frozenset({"then", "else", "elif", "do", "!", "{", "}", "function"})
_DECLARING = frozenset({"export", "declare", "typeset", "local", "readonly"})
_TESTS = frozenset({"[", "[[", "test", "(("})
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellCommand:
    """Hold the words of a command after expansion, and the variables that it exports."""

    environment: dict[str, str]
    words: tuple[str, ...]


@dataclass(slots=True)
class _Word:
    """pieces: (text, whether it is expanded, whether what it expands to is split). array: the
    words between the parentheses of NAME=(...)."""

    pieces: list[tuple[str, bool, bool]] = field(default_factory=list)
    array: list[_Word] | None = None

    @property
    def text(self) -> str:
        return "".join(piece[0] for piece in self.pieces)


def slurm_directives(text: str) -> dict[str, str]:
    """Return the options of the #SBATCH lines, without dashes."""
    return {name.lstrip("-"): value or "" for name, value in _DIRECTIVE.findall(text)}


def read_shell_commands(text: str) -> list[ShellCommand]:
    """Return the commands in the order of the text. Raises ValueError where no shell reads it."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has more than {MOST_CHARACTERS} characters")
    try:
        found = [*_Reader().commands(_Tokens(text).read())]
    except RecursionError:
        raise ValueError("its parentheses are nested too deeply") from None
    if sum(len(command.words) for command in found) > MOST_WORDS:
        raise ValueError(f"it has more than {MOST_WORDS} words")
    return found


class _Tokens:
    """Split a text into words and operators; comments, redirections and here-documents go."""

    def __init__(self, text: str) -> None:
        self.text = text.replace("\r\n", "\n")
        self.at = 0

    def read(self, until: str = "") -> Iterator[_Word | str]:
        word: _Word | None = None
        text = self.text
        is_redirected = False
        while self.at < len(text):
            char = text[self.at]
            if text.startswith("\\\n", self.at):
                self.at += 2
                continue
            if char in " \t\n;&|()<>":
                if word is not None and char == "(" and _ASSIGNED.fullmatch(word.text):
                    self.at += 1
                    word.array = [w for w in self.read(until=")") if isinstance(w, _Word)]
                    continue
                if word is not None:
                    if char in "<>" and word.text.isdigit():
                        word = None
                    if word is not None and not is_redirected:
                        yield word
                    is_redirected = is_redirected and word is None
                    word = None
                if char in " \t":
                    self.at += 1
                elif char in "<>" or text.startswith("&>", self.at):
                    is_redirected = self._redirection()
                else:
                    double = text[self.at : self.at + 2]
                    self.at += 2 if double in ("&&", "||", ";;") else 1
                    if char == until:
                        return
                    is_redirected = False
                    yield double if double in ("&&", "||", ";;") else char
            elif char == "#" and word is None:
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            else:
                word = word or _Word()
                self._piece(word)
        if until:
            raise ValueError("no closing parenthesis")
        if word is not None and not is_redirected:
            yield word

    def _redirection(self) -> bool:
        """Move behind the operator; return whether the next word is the file."""
        match = re.compile(r"&?[<>]{1,3}(?:&-?\d?)?-?").match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        if match[0].startswith("<<") and not match[0].startswith("<<<"):
            end = re.compile(r"\s*['\"]?(\w+)['\"]?[^\n]*\n.*?^\s*\1\s*$", re.DOTALL | re.MULTILINE)
            document = end.match(self.text, self.at)
            self.at = document.end() if document else len(self.text)
            return False
        return not re.search(r"&(?:\d|-)$", match[0])

    def _piece(self, word: _Word) -> None:
        text, start = self.text, self.at
        char = text[start]
        if char == "\\":
            word.pieces.append((text[start + 1 : start + 2], False, False))
            self.at += 2
        elif char == "'":
            self.at = self._index("'", start + 1, "no closing quotation") + 1
            word.pieces.append((text[start + 1 : self.at - 1], False, False))
        elif char == '"':
            self.at += 1
            self._quoted(word)
        elif char in "$`":
            self._expression()
            word.pieces.append((text[start : self.at], True, True))
        else:
            match = re.compile(r"[^ \t\n;&|()<>\\'\"$`]+").match(text, start)
            assert match is not None
            self.at = match.end()
            word.pieces.append((match[0], False, False))

    def _quoted(self, word: _Word) -> None:
        begin = self.at
        plain: list[str] = []
        while self.at < len(self.text) and self.text[self.at] != '"':
            if self.text[self.at] == "\\":
                escaped = self.text[self.at + 1 : self.at + 2]
                plain.append(
                    "" if escaped == "\n" else escaped if escaped in '"\\$`' else f"\\{escaped}"
                )
                self.at += 2
            elif self.text[self.at] in "$`":
                start = self.at
                self._expression()
                word.pieces.append(("".join(plain), False, False))
                word.pieces.append((self.text[start : self.at], True, False))
                plain = []
            else:
                plain.append(self.text[self.at])
                self.at += 1
        if self.at >= len(self.text):
            self.at = begin
            raise ValueError("no closing quotation")
        self.at += 1
        word.pieces.append(("".join(plain), False, False))

    def _expression(self) -> None:
        """Move behind $NAME, ${...}, $(...) or `...`."""
        text, start = self.text, self.at
        if text[start] == "`":
            self.at = self._index("`", start + 1, "no closing backquote") + 1
            return
        opening = text[start + 1 : start + 2]
        closing = {"{": "}", "(": ")"}.get(opening)
        if closing is None:
            match = re.compile(r"\$(?:\w+|[@*#?$!-])?").match(text, start)
            assert match is not None
            self.at = match.end()
            return
        depth, at = 0, start + 1
        while at < len(text):
            depth += (text[at] == opening) - (text[at] == closing)
            at += 1
            if depth == 0:
                self.at = at
                return
        raise ValueError(f"no closing {closing}")

    def _index(self, char: str, start: int, message: str) -> int:
        at = self.text.find(char, start)
        if at < 0:
            raise ValueError(message)
        return at


class _Reader:
    """Follow the assignments of a script. variables: None where branches differ."""

    def __init__(self) -> None:
        self.variables: dict[str, str | tuple[str, ...] | None] = {}
        self.exported: set[str] = set()
        self.depth = 0

    def commands(self, tokens: Iterator[_Word | str]) -> Iterator[ShellCommand]:
        statement: list[_Word] = []
        is_conditional = False
        for token in (*tokens, "\n"):
            if isinstance(token, _Word):
                statement.append(token)
                continue
            first = statement[0].text if statement else ""
            yield from self._run(statement, is_conditional)
            is_conditional = token in ("&&", "||") and (is_conditional or first in _TESTS)
            statement = []

    def _run(self, statement: list[_Word], is_conditional: bool) -> Iterator[ShellCommand]:
        while statement and statement[0].text in _KEYWORDS | _OPENING | _CLOSING:
            keyword = statement.pop(0).text
            self.depth += (keyword in _OPENING) - (keyword in _CLOSING)
            if keyword in ("for", "case"):
                if statement and keyword == "for":
                    self.variables[statement[0].text] = None
                return
        if statement and statement[0].text in _TESTS:
            return
        if statement and statement[0].text in _DECLARING:
            declaring = statement.pop(0).text
            names = [word for word in statement if not word.text.startswith("-")]
            for word in names:
                self._assign(word, is_conditional)
                if declaring == "export" or any(w.text == "-x" for w in statement):
                    self.exported.add(re.split(r"\+?=", word.text)[0])
            return
        own: dict[str, str] = {}
        leading: list[_Word] = []
        while statement and (match := _ASSIGNED.fullmatch(statement[0].text)):
            leading.append(statement.pop(0))
            own[match[1]] = " ".join(self._expand(leading[-1], split=False)).partition("=")[2]
        if not statement:
            for word in leading:
                self._assign(word, is_conditional)
            return
        words = tuple(text for word in statement for text in self._expand(word))
        exports = {
            name: value
            for name in sorted(self.exported)
            if isinstance(value := self.variables.get(name), str)
        }
        if words:
            yield ShellCommand(environment={**exports, **own}, words=words)

    def _assign(self, word: _Word, is_conditional: bool) -> None:
        match = _ASSIGNED.fullmatch(word.text)
        if match is None:
            return
        name, appends = match[1], bool(match[2])
        before = self.variables.get(name)
        if word.array is not None:
            items = tuple(text for item in word.array for text in self._expand(item))
            known: str | tuple[str, ...] | None = items
            if appends:
                known = (*before, *items) if isinstance(before, tuple) else None
        else:
            value = "".join(self._expand(word, split=False)).partition("=")[2]
            known = value
            if appends:
                known = before + value if isinstance(before, str) else None
        if (self.depth or is_conditional) and known != before:
            known = None
        self.variables[name] = known

    def _expand(self, word: _Word, *, split: bool = True) -> list[str]:
        text = word.text
        whole = _WHOLE_ARRAY.fullmatch(text)
        if whole is not None and isinstance(items := self.variables.get(whole[1]), tuple):
            return list(items)
        fields, joined = [""], True
        for piece, expands, splits in word.pieces:
            value = _EXPANSION.sub(self._value, piece) if expands else piece
            if expands and (sum_ := _EXPR.fullmatch(value)) is not None:
                total = _whole_number((sum_[1] or sum_[2]).replace("\\", ""))
                value = value if total is None else str(total)
            is_known = "$(" not in value and "`" not in value
            if expands and splits and split and value != piece and is_known:
                first, *others = value.split() or [""]
                fields[-1] += first
                fields += others
                joined = bool(value.split())
            else:
                fields[-1] += value
                joined = True
        return fields if joined or len(fields) > 1 or fields[0] else []

    def _value(self, match: re.Match[str]) -> str:
        if match["sum"] is not None:
            text = re.sub(r"(?<!\$)\b([A-Za-z_]\w*)", r"$\1", match["sum"])
            total = _whole_number(_EXPANSION.sub(self._value, text))
            return match[0] if total is None else str(total)
        known = self.variables.get(match["braced"] or match["plain"])
        if isinstance(known, tuple):
            return " ".join(known)
        return match[0] if known is None else known


def _whole_number(text: str) -> int | None:
    if len(text) > 200 or not re.fullmatch(r"[\d\s+*/()-]+", text):
        return None
    try:
        return _computed(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        value = _OPERATIONS[type(node.op)](_computed(node.left), _computed(node.right))
        if abs(value) < 2**53:
            return value
    raise ValueError(ast.dump(node))
