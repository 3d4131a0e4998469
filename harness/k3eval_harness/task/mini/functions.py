"""Kinds of small functions, each with the wrong lines that a careless author might have written.

A `Function` is right as it stands; its docstring alone determines the body. A `Slip` replaces one body line
and belongs to one of `KINDS`. Names come from the caller, numbers and forms from the random source, so that
the same seed always gives the same function.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Value = int | float | bool | str | None | list[int] | dict[str, int]
Arguments = tuple[Value, ...]
Words = Iterator[str]

KINDS = (
    "operator",
    "constant",
    "compare",
    "key",
    "offbyone",
    "function",
    "bool",
    "variable",
    "swap",
    "noreturn",
    "init",
)


@dataclass(frozen=True)
class Slip:
    """A wrong version of body line ``line`` (0-based, with the indentation of that line)."""

    kind: str
    line: int
    text: str


@dataclass(frozen=True)
class Function:
    """One function: ``body`` lines carry their indentation inside the function, ``draw`` makes arguments."""

    name: str
    params: tuple[str, ...]
    doc: str
    body: tuple[str, ...]
    slips: tuple[Slip, ...]
    draw: Callable[[random.Random], Arguments]

    def source(self, slip: Slip | None = None) -> str:
        """The text of the function, ending in one newline, with ``slip`` in place if given."""
        body = list(self.body)
        if slip is not None:
            body[slip.line] = slip.text
        lines = [f"def {self.name}({', '.join(self.params)}):", f'    """{self.doc}"""']
        return "\n".join(lines + [f"    {line}" for line in body]) + "\n"


def _wrong_number(rng: random.Random, right: int, low: int = 2, high: int = 99) -> int:
    """Another number: a neighbour, one with swapped digits, or any other in range."""
    options = {right + 1, right - 1, right + 10, int(str(right)[::-1]), rng.randint(low, high)}
    return rng.choice(sorted(n for n in options if n != right and n >= 0))


def _whole(rng: random.Random, low: int = 1, high: int = 99) -> int:
    return rng.randint(low, high)


def _integers(rng: random.Random, least: int = 3, most: int = 7) -> list[int]:
    return [rng.randint(1, 99) for _ in range(rng.randint(least, most))]


def _single(line: str, *slips: tuple[str, str]) -> tuple[tuple[str, ...], tuple[Slip, ...]]:
    """Body and slips of a one-line function; forgetting ``return`` is always possible."""
    made = [Slip(kind, 0, text) for kind, text in slips]
    made.append(Slip("noreturn", 0, line.removeprefix("return ")))
    return (line,), tuple(made)


_OPERATORS = {"plus": "+", "minus": "-", "times": "*"}
_COMPARISONS = {"at least": ">=", "more than": ">", "at most": "<=", "less than": "<"}
_BUILTINS = {
    "the largest item of {}": "max",
    "the smallest item of {}": "min",
    "the sum of the items of {}": "sum",
    "the number of items in {}": "len",
    "the items of {} in sorted order": "sorted",
}
_METHODS = {"in upper case": "upper", "in lower case": "lower", "in title case": "title"}
_SUMS = ("total", "result", "amount")
_ITEMS = ("item", "entry", "value")


def arithmetic(rng: random.Random, name: str, words: Words) -> Function:
    """Two arguments and an operator; a third argument may be a decoy."""
    a, b, c = next(words), next(words), next(words)
    phrase, op = rng.choice(sorted(_OPERATORS.items()))
    decoy = rng.random() < 0.7
    slips = [("operator", f"return {a} {wrong} {b}") for wrong in _OPERATORS.values() if wrong != op]
    if decoy:
        slips += [("variable", f"return {a} {op} {c}"), ("variable", f"return {c} {op} {b}")]
    if op == "-":
        slips.append(("swap", f"return {b} - {a}"))
    body, made = _single(f"return {a} {op} {b}", *slips)
    params = [a, b, c] if decoy else [a, b]
    rng.shuffle(params)
    count = len(params)
    return Function(
        name,
        tuple(params),
        f"Return {a} {phrase} {b}.",
        body,
        made,
        lambda r: tuple(_whole(r) for _ in range(count)),
    )


def scaling(rng: random.Random, name: str, words: Words) -> Function:
    """One argument, an operator and a number."""
    a, k = next(words), _whole(rng, 2)
    phrase, op = rng.choice(sorted(_OPERATORS.items()))
    slips = [("operator", f"return {a} {wrong} {k}") for wrong in _OPERATORS.values() if wrong != op]
    slips.append(("constant", f"return {a} {op} {_wrong_number(rng, k)}"))
    body, made = _single(f"return {a} {op} {k}", *slips)
    return Function(name, (a,), f"Return {a} {phrase} {k}.", body, made, lambda r: (_whole(r),))


def comparison(rng: random.Random, name: str, words: Words) -> Function:
    """One argument against a number."""
    a, k = next(words), _whole(rng, 2)
    phrase, op = rng.choice(sorted(_COMPARISONS.items()))
    slips = [("compare", f"return {a} {wrong} {k}") for wrong in _COMPARISONS.values() if wrong != op]
    slips.append(("constant", f"return {a} {op} {_wrong_number(rng, k)}"))
    body, made = _single(f"return {a} {op} {k}", *slips)

    def draw(r: random.Random) -> Arguments:
        return (r.choice((k, k, k - 1, k + 1, r.randint(0, 120), r.randint(k - 12, k + 12))),)

    return Function(name, (a,), f"Return True if {a} is {phrase} {k}.", body, made, draw)


def ordering(rng: random.Random, name: str, words: Words) -> Function:
    """Two arguments against each other."""
    a, b = next(words), next(words)
    phrase, op = rng.choice(sorted(_COMPARISONS.items()))
    slips = [("compare", f"return {a} {wrong} {b}") for wrong in _COMPARISONS.values() if wrong != op]
    slips.append(("swap", f"return {b} {op} {a}"))
    body, made = _single(f"return {a} {op} {b}", *slips)
    params = (a, b) if rng.random() < 0.5 else (b, a)

    def draw(r: random.Random) -> Arguments:
        first = _whole(r)
        return (first, r.choice((first, first, first - 1, first + 1, _whole(r))))

    return Function(name, params, f"Return True if {a} is {phrase} {b}.", body, made, draw)


def entry(rng: random.Random, name: str, words: Words) -> Function:
    """One entry of a record."""
    a, key, other = next(words), next(words), next(words)
    body, made = _single(f'return {a}["{key}"]', ("key", f'return {a}["{other}"]'))

    def draw(r: random.Random) -> Arguments:
        first, second = r.sample(range(1, 100), 2)
        return ({key: first, other: second},)

    return Function(name, (a,), f"Return the {key} entry of {a}.", body, made, draw)


def entry_or_default(rng: random.Random, name: str, words: Words) -> Function:
    """One entry of a record, or a number when it is missing."""
    a, key, other, k = next(words), next(words), next(words), _whole(rng, 2)
    wrong = _wrong_number(rng, k)
    body, made = _single(
        f'return {a}.get("{key}", {k})',
        ("constant", f'return {a}.get("{key}", {wrong})'),
        ("key", f'return {a}.get("{other}", {k})'),
    )

    def draw(r: random.Random) -> Arguments:
        first, second = r.sample(range(1, 100), 2)
        return (r.choice(({key: first, other: second}, {other: second}, {key: first})),)

    return Function(name, (a,), f"Return the {key} entry of {a}, or {k} if missing.", body, made, draw)


def slicing(rng: random.Random, name: str, words: Words) -> Function:
    """The start, the end or the rest of a list."""
    a, k = next(words), rng.randint(2, 6)
    doc, form = rng.choice(
        (
            ("Return the first {k} items of {a}.", "return {a}[:{k}]"),
            ("Return the last {k} items of {a}.", "return {a}[-{k}:]"),
            ("Return {a} without the first {k} items.", "return {a}[{k}:]"),
        )
    )
    slips = [("offbyone", form.format(a=a, k=wrong)) for wrong in (k - 1, k + 1)]
    body, made = _single(form.format(a=a, k=k), *slips)
    return Function(name, (a,), doc.format(a=a, k=k), body, made, lambda r: (_integers(r, 8, 10),))


def builtin_call(rng: random.Random, name: str, words: Words) -> Function:
    """A builtin function over a list."""
    a = next(words)
    phrase, right = rng.choice(sorted(_BUILTINS.items()))
    slips = [("function", f"return {wrong}({a})") for wrong in _BUILTINS.values() if wrong != right]
    body, made = _single(f"return {right}({a})", *slips)
    return Function(name, (a,), f"Return {phrase.format(a)}.", body, made, lambda r: (_integers(r),))


def text_method(rng: random.Random, name: str, words: Words) -> Function:
    """A method of a string."""
    a, phrase_words = next(words), [next(words) for _ in range(4)]
    phrase, right = rng.choice(sorted(_METHODS.items()))
    slips = [("function", f"return {a}.{wrong}()") for wrong in _METHODS.values() if wrong != right]
    body, made = _single(f"return {a}.{right}()", *slips)

    def draw(r: random.Random) -> Arguments:
        first, second = r.sample(phrase_words, 2)
        return (f"{first} {second[:2].upper()}{second[2:]}",)

    return Function(name, (a,), f"Return {a} {phrase}.", body, made, draw)


def both_or_either(rng: random.Random, name: str, words: Words) -> Function:
    """Two conditions joined by ``and`` or ``or``."""
    a, b = next(words), next(words)
    doc, right, wrong = rng.choice(
        (
            (f"Return True if {a} and {b} are both positive.", "and", "or"),
            (f"Return True if {a} or {b} is positive.", "or", "and"),
        )
    )
    body, made = _single(f"return {a} > 0 {right} {b} > 0", ("bool", f"return {a} > 0 {wrong} {b} > 0"))

    def draw(r: random.Random) -> Arguments:
        return (r.choice((-1, 1)) * _whole(r), r.choice((-1, 1)) * _whole(r))

    return Function(name, (a, b), doc, body, made, draw)


def choice(rng: random.Random, name: str, words: Words) -> Function:
    """One of two arguments by a flag."""
    a, b, flag, decoy = next(words), next(words), next(words), next(words)
    params = [a, b, flag, decoy]
    rng.shuffle(params)
    body, made = _single(
        f"return {a} if {flag} else {b}",
        ("swap", f"return {b} if {flag} else {a}"),
        ("variable", f"return {decoy} if {flag} else {b}"),
        ("variable", f"return {a} if {flag} else {decoy}"),
    )

    def draw(r: random.Random) -> Arguments:
        numbers = iter(r.sample(range(1, 100), 3))
        return tuple(r.random() < 0.5 if param == flag else next(numbers) for param in params)

    return Function(name, tuple(params), f"Return {a} if {flag} is true, else {b}.", body, made, draw)


def limit(rng: random.Random, name: str, words: Words) -> Function:
    """An argument kept within a bound."""
    a, k = next(words), _whole(rng, 2)
    phrase, right, wrong = rng.choice((("at most", "min", "max"), ("at least", "max", "min")))
    body, made = _single(
        f"return {right}({a}, {k})",
        ("function", f"return {wrong}({a}, {k})"),
        ("constant", f"return {right}({a}, {_wrong_number(rng, k)})"),
    )

    def draw(r: random.Random) -> Arguments:
        return (r.randint(0, 120),)

    return Function(name, (a,), f"Return {a}, but {phrase} {k}.", body, made, draw)


def record(rng: random.Random, name: str, words: Words) -> Function:
    """A record made of two arguments."""
    a, b, first, second, other = (next(words) for _ in range(5))
    body, made = _single(
        f'return {{"{first}": {a}, "{second}": {b}}}',
        ("swap", f'return {{"{first}": {b}, "{second}": {a}}}'),
        ("key", f'return {{"{other}": {a}, "{second}": {b}}}'),
        ("key", f'return {{"{first}": {a}, "{other}": {b}}}'),
    )
    doc = f"Return a record of {first} set to {a} and {second} set to {b}."
    return Function(name, (a, b), doc, body, made, lambda r: tuple(r.sample(range(1, 100), 2)))


def number_sum(rng: random.Random, name: str, words: Words) -> Function:
    """A sum over a range of numbers."""
    n, low = next(words), rng.randint(1, 9)
    total, item = rng.choice(_SUMS), rng.choice(("step", "number"))
    body = (
        f"{total} = 0",
        f"for {item} in range({low}, {n} + 1):",
        f"    {total} += {item}",
        f"return {total}",
    )
    slips = (
        Slip("init", 0, f"{total} = {rng.choice((1, 2, 10))}"),
        Slip("offbyone", 1, f"for {item} in range({low}, {n}):"),
        Slip("offbyone", 1, f"for {item} in range({low + 1}, {n} + 1):"),
        Slip("operator", 2, f"    {total} -= {item}"),
    )
    doc = f"Return the sum of the numbers from {low} to {n}."
    return Function(name, (n,), doc, body, slips, lambda r: (low + r.randint(2, 12),))


def accumulation(rng: random.Random, name: str, words: Words) -> Function:
    """A sum with a start, or a product, over a list."""
    a, k = next(words), _whole(rng, 2)
    total, item = rng.choice(_SUMS), rng.choice(_ITEMS)
    doc, start, op, wrong_op, wrong_start, kind = rng.choice(
        (
            (f"Return the product of the items of {a}.", 1, "*=", "+=", 0, "init"),
            (
                f"Return {k} plus the sum of the items of {a}.",
                k,
                "+=",
                "-=",
                _wrong_number(rng, k),
                "constant",
            ),
            (f"Return {k} minus the sum of the items of {a}.", k, "-=", "+=", 0, "init"),
        )
    )
    body = (f"{total} = {start}", f"for {item} in {a}:", f"    {total} {op} {item}", f"return {total}")
    slips = (
        Slip(kind, 0, f"{total} = {wrong_start}"),
        Slip("operator", 2, f"    {total} {wrong_op} {item}"),
    )
    return Function(
        name, (a,), doc, body, slips, lambda r: ([r.randint(2, 9) for _ in range(r.randint(2, 4))],)
    )


def counting(rng: random.Random, name: str, words: Words) -> Function:
    """How many items of a list pass a comparison."""
    a, k = next(words), _whole(rng, 2, 60)
    count, item = rng.choice(("count", "found", "hits")), rng.choice(_ITEMS)
    phrase, op = rng.choice(sorted(_COMPARISONS.items()))
    body = (
        f"{count} = 0",
        f"for {item} in {a}:",
        f"    if {item} {op} {k}:",
        f"        {count} += 1",
        f"return {count}",
    )
    slips = [Slip("compare", 2, f"    if {item} {bad} {k}:") for bad in _COMPARISONS.values() if bad != op]
    slips += [
        Slip("init", 0, f"{count} = {rng.choice((1, 2))}"),
        Slip("constant", 2, f"    if {item} {op} {_wrong_number(rng, k)}:"),
        Slip("operator", 3, f"        {count} -= 1"),
    ]

    def draw(r: random.Random) -> Arguments:
        near = [k, k - 1, k + 1, k - 5, k + 5]
        return ([r.choice((r.choice(near), r.randint(1, 99))) for _ in range(r.randint(3, 7))],)

    return Function(name, (a,), f"Count the items of {a} that are {phrase} {k}.", body, tuple(slips), draw)


def division(rng: random.Random, name: str, words: Words) -> Function:
    """A quotient with a way out for zero."""
    a, b, k = next(words), next(words), _whole(rng, 2)
    body = (f"if {b} == 0:", f"    return {k}", f"return {a} / {b}")
    slips = (
        Slip("constant", 1, f"    return {_wrong_number(rng, k)}"),
        Slip("swap", 2, f"return {b} / {a}"),
        Slip("operator", 2, f"return {a} * {b}"),
        Slip("compare", 0, f"if {b} != 0:"),
    )
    doc = f"Return {a} divided by {b}, or {k} if {b} is zero."

    def draw(r: random.Random) -> Arguments:
        below = r.choice((0, r.choice((2, 4, 5, 8, 10))))
        return (r.randint(2, 60), below)

    return Function(name, (a, b), doc, body, slips, draw)


BUILDERS: tuple[Callable[[random.Random, str, Words], Function], ...] = (
    arithmetic,
    scaling,
    comparison,
    ordering,
    entry,
    entry_or_default,
    slicing,
    builtin_call,
    text_method,
    both_or_either,
    choice,
    limit,
    record,
    number_sum,
    accumulation,
    counting,
    division,
)
