"""Keys and values are checked in one place, and a mistake is told with what was expected."""

import tomllib
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from shardwise.core.errors import UsageError
from shardwise.recipes.schema import Bound, build, hash_of, keys_of, parse_value, put, to_toml


@dataclass(frozen=True)
class Inner:
    rate: Annotated[float, Bound(0, is_low_allowed=False)] = 0.1
    is_on: bool = False


@dataclass(frozen=True)
class Outer:
    kind: Literal["a", "b"]
    count: Annotated[int, Bound(1, 9)] = 3
    name: str = ""
    inner: Inner = field(default_factory=Inner)


def test_values_become_a_dataclass_and_defaults_hold() -> None:
    assert build(Outer, {"kind": "b", "inner": {"rate": 2}}) == Outer("b", 3, "", Inner(2.0, False))
    assert type(build(Outer, {"kind": "b", "inner": {"rate": 2}}).inner.rate) is float


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "c"}, "kind must be one of a, b but is 'c'."),
        ({"kind": ["a"]}, "kind must be one of a, b but is ['a']."),
        ({}, "The key 'kind' is missing. It is one of a, b."),
        ({"kind": "a", "count": 10}, "count must be a whole number, from 1 to 9, but is 10."),
        ({"kind": "a", "count": 2.0}, "count must be a whole number, from 1 to 9, but is 2.0."),
        ({"kind": "a", "count": True}, "count must be a whole number, from 1 to 9, but is True."),
        ({"kind": "a", "name": 3}, "name must be text but is 3."),
        ({"kind": "a", "inner": 3}, "inner must be a table of keys and values but is 3."),
        ({"kind": "a", "inner": {"rate": 0}}, "inner.rate must be a number, above 0, but is 0.0."),
        ({"kind": "a", "inner": {"rate": float("nan")}}, "inner.rate must be a number, above 0, but is nan."),
        ({"kind": "a", "inner": {"rate": float("inf")}}, "inner.rate must be a number, above 0, but is inf."),
        ({"kind": "a", "inner": {"is_on": 1}}, "inner.is_on must be true or false but is 1."),
        ({"kind": "a", "inner": {"raet": 1}}, "There is no key 'inner.raet'. Did you mean 'inner.rate'?"),
        ({"kind": "a", "cuont": 1}, "There is no key 'cuont'. Did you mean 'count'?"),
        ({"kind": "a", "xyz": 1}, "There is no key 'xyz'. Known keys: kind, count, name, inner.rate, inner.is_on."),
    ],
    ids=str,
)
def test_mistake_is_told_with_what_was_expected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        build(Outer, values)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("count", "7", 7),
        ("inner.rate", "1e-3", 1e-3),
        ("inner.rate", "2", 2.0),
        ("inner.is_on", "true", True),
        ("name", "two words, 3", "two words, 3"),
        ("name", "7", "7"),
        ("kind", "b", "b"),
    ],
)
def test_text_of_the_command_line_becomes_a_value(key: str, text: str, value: object) -> None:
    parsed = parse_value(Outer, key, text)
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize(("key", "text"), [("count", "many"), ("count", "[1]"), ("inner.is_on", "yes"), ("inner.rate", "nan")])
def test_text_of_another_type_is_refused(key: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"^{key} must be "):
        parse_value(Outer, key, text)


def test_key_without_its_table_is_found_by_its_last_part() -> None:
    with pytest.raises(UsageError, match=r"Did you mean 'inner\.rate'\?"):
        parse_value(Outer, "rate", "1")


def test_values_survive_toml_and_their_order_does_not_change_the_hash() -> None:
    values = {"kind": "a", "name": 'quotes " and \\ and ü', "inner": {"rate": 1e-05, "is_on": True}}
    assert tomllib.loads(to_toml(values)) == values
    assert hash_of(values) == hash_of(dict(reversed(values.items())))
    assert hash_of(values) != hash_of({**values, "kind": "b"})


def test_put_sets_what_is_nested_and_refuses_what_is_no_table() -> None:
    values: dict[str, Any] = {"inner": {"rate": 1}, "count": 2}
    put(values, "inner.is_on", True)
    assert values == {"inner": {"rate": 1, "is_on": True}, "count": 2}
    with pytest.raises(UsageError, match="count must be a table"):
        put(values, "count.more", 1)


def test_all_keys_are_known_by_dotted_names() -> None:
    assert list(keys_of(Outer)) == ["kind", "count", "name", "inner.rate", "inner.is_on"]
