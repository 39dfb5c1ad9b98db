"""GBNF: the language stays the same on its way into the stages' notation, and mistakes are named."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from types import FrameType

import pytest
from hypothesis import given, settings, strategies as st
from llguidance import LLMatcher

from skippy.engine.grammar import Grammar, GrammarMismatch, GrammarVocabulary
from skippy.engine.toy_vocabulary import ToyVocabulary
from skippy.frontend.gbnf import GbnfError, gbnf_to_lark

VOCABULARY = GrammarVocabulary.of(ToyVocabulary())


@pytest.fixture(scope="module", autouse=True)
def no_budget() -> Iterator[None]:
    """Random grammars may be ambiguous beyond measure, and what they cost depends on the machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MASK_SECS", "FREE_SECS"):
            patch.setattr(f"skippy.engine.grammar.{name}", 600.0)
        yield


def fits(grammar: Grammar, text: str) -> bool:
    """Whether a whole text is in the language."""
    grammar.rewind(0)
    try:
        allowed = grammar.allowed(list(text.encode()))
    except GrammarMismatch:
        return False
    return bool(allowed[ToyVocabulary.EOS])


def compiled(gbnf: str) -> Grammar:
    lark = gbnf_to_lark(gbnf)
    assert LLMatcher.validate_grammar(lark) == ""
    return VOCABULARY.compile(lark, 0)


@pytest.mark.parametrize(
    ("gbnf", "good", "bad"),
    [
        ('root ::= "yes" | "no"', ["yes", "no"], ["", "ye", "yesno", "maybe"]),
        ('root ::= [a-c]+ "b" # the end', ["ab", "bb", "abcb"], ["b", "a", "abd"]),
        ('root ::= x x\nx ::= "a"* "ab"\n', ["abab", "aabab", "abaab"], ["ab", "aab"]),
        ('root ::= "(" root? ")" root?', ["()", "(())()", "()()"], ["", "(", "())"]),
        ('root ::= [^"\\\\\\n]{2,3}', ["ab", "é語x"], ["a", "abcd", 'a"', "a\n"]),
        ('root ::= "\\x41" "\\u00e9" "\\U0001F600" "\\t\\r\\n\\\\\\"\\[\\]\\-"', ['Aé😀\t\r\n\\"[]-'], ["A"]),
        ("root ::= . .", ["\n\n", "😀é"], ["a", "abc"]),
        ('root ::= ("a" |\n  # or\n  "b")\n  ', ["a", "b"], ["", "c"]),
        ('root ::= "a"{2} "b"{0,1} "c"{1,}', ["aac", "aabccc"], ["aa", "ac", "aabb"]),
        ('root ::= "" | "x"', ["", "x"], ["xx"]),
        ("root ::= [a\\]-]+", ["a", "]-a"], ["b", "\\"]),
        ('root ::= expr "=" expr\nexpr ::= expr "+" expr | [0-9]+', ["1=1", "1+2=3"], ["1", "1+=2", "=1"]),
        ('root ::= ("ab" | "a") ("c" | "bc")', ["abc", "ac", "abbc"], ["ab", "bc"]),
        ('root ::= item-1\nitem-1 ::= "x"', ["x"], ["y"]),
        ('root ::= "a" "b"{0} ("c" "d"){0,0}', ["a"], ["ab", "acd"]),
        ('root ::= "a"*?+{1,2} "b"', ["b", "ab", "aab"], ["a"]),
        ("root ::= " + "(" * 27 + '"a" root?' + ")+" * 27, ["a", "aa"], [""]),
    ],
)
def test_languages(gbnf: str, good: list[str], bad: list[str]) -> None:
    grammar = compiled(gbnf)
    assert [text for text in good if not fits(grammar, text)] == []
    assert [text for text in bad if fits(grammar, text)] == []


@pytest.mark.parametrize(
    ("gbnf", "reason"),
    [
        ('root ::= "a" root', "never comes to an end"),
        ("", "no rule named 'root'"),
        ('rot ::= "a"', "no rule named 'root'"),
        ("root ::= a", "uses 'a', which is not defined"),
        ('root ::= "a', "ends inside"),
        ('root ::= "\\q"', r"unknown escape \\q at line 1, column 13"),
        ('root ::= "\\', "unknown escape"),
        ('root := "a"', "expected '::='"),
        ('root ::= "a" )', "expected the end of the line"),
        ('root ::= ("a"', r"expected '\)'"),
        ("root ::= *", "nothing to repeat"),
        ('root ::= "a"{3,1}', "from 3 to 1"),
        ('root ::= "a"{3001}', "more than 2000 repetitions"),
        ('root ::= "a"{x}', r"expected \{m\}"),
        ("root ::= [z-a]", "ends before it begins"),
        ("root ::= []", "class without"),
        ('root ::= "\\ud800"', "no character"),
        ('root ::= "a"\nroot ::= "b"', "defined twice"),
        ("root ::= " + "(" * 28 + '"a"' + ")" * 28, "more than 27 deep"),
        ('root ::= "a"' + "*" * 12_000, "more than 4 repetitions of repetitions"),
        ("root ::= !<name>", "by its id"),
        ("root ::= <two words>", "expected <"),
        ('root ::= "' + "a" * 20_001 + '"', "more than 20000"),
        ("x" * 70_000, "at most 65536"),
        ("".join(f'r{n} ::= "a"\n' for n in range(1_001)), "more than 1000 rules"),
    ],
)
def test_mistakes_are_named(gbnf: str, reason: str) -> None:
    with pytest.raises(GbnfError, match=reason):
        gbnf_to_lark(gbnf)


def calls_of(gbnf: str) -> int:
    """How many functions are called to translate a grammar."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        gbnf_to_lark(gbnf)
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize(
    "rule",
    ['r{0} ::= "a" r{1} | "b" r{1}', "r{0} ::= (r{1} r{1})+ r{1}?", "root{0} ::= r{1}\nr{0} ::= r{1}"],
)
def test_the_work_grows_with_the_grammar_alone(rule: str) -> None:
    def chain(length: int) -> str:
        lines = [rule.format(number, number + 1) for number in range(length)]
        return "\n".join(
            ["root ::= " + " ".join(f"r{n}" for n in range(length, -1, -1)), *lines, f'r{length} ::= "x"']
        )

    small, large = calls_of(chain(100)), calls_of(chain(400))
    assert large < 5 * small


@given(st.text(max_size=60) | st.text(alphabet='root:=" []()|*+?{}0123,ab\\n\n#<>!.^-', max_size=60))
def test_any_text_is_a_grammar_or_an_error_of_ours(text: str) -> None:
    try:
        lark = gbnf_to_lark("root ::= " + text)
    except GbnfError:
        return
    assert lark.startswith("start: ")


# -- against a recogniser that is too simple to be wrong ---------------------------------------------------

Body = tuple[str, ...]  # of literals, and of "0" … "2" for rules
bodies = st.lists(st.sampled_from(["a", "b", "ab", "ba", "aa", "0", "1", "2"]), max_size=3).map(tuple)
grammars = st.tuples(*[st.lists(bodies, min_size=1, max_size=3)] * 3)
TEXTS = ["".join(chars) for size in range(4) for chars in itertools.product("ab", repeat=size)]


def language(rules: tuple[list[Body], ...]) -> set[str]:
    """Texts of up to three characters of rule 0: what follows from the rules until nothing new does."""
    known: list[set[str]] = [set(), set(), set()]
    while True:
        before = sum(map(len, known))
        for number, alternatives in enumerate(rules):
            for body in alternatives:
                texts = {""}
                for part in body:
                    choices = known[int(part)] if part.isdigit() else {part}
                    texts = {a + b for a in texts for b in choices if len(a + b) <= 3}
                known[number] |= texts
        if sum(map(len, known)) == before:
            return known[0]


@settings(max_examples=60, deadline=None)
@given(grammars)
def test_random_grammars_keep_their_language(rules: tuple[list[Body], ...]) -> None:
    expected = language(rules)
    lines = []
    for number, alternatives in enumerate(rules):
        names = [[f"r{part}" if part.isdigit() else f'"{part}"' for part in body] for body in alternatives]
        lines.append(f"r{number} ::= " + " | ".join(" ".join(body or ['""']) for body in names))
    gbnf = "root ::= r0\n" + "\n".join(lines)
    try:
        grammar = VOCABULARY.compile(gbnf_to_lark(gbnf), 0)
    except GbnfError:
        assert not expected
        return
    assert {text for text in TEXTS if fits(grammar, text)} == expected
