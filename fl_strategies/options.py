"""Settings, each defined once: its default, its rule and its meaning.

Options are frozen data classes. A field is one setting (`option`), an optional group of
settings (`group`), or one of several kinds of options (`variants`). In Python they are values::

    FedMDOptions(release=SampleOnce(num_samples=300))

In a configuration, which holds only text, numbers and booleans, they are flat and have
kebab-case keys: ``release = "nfdp"``, ``num-samples = 300``. Constructors, messages to
parties, run configurations, the command line and the documentation all use these definitions.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from types import MappingProxyType, UnionType
from typing import (
    Any,
    ClassVar,
    Final,
    Literal,
    Self,
    TypeAlias,
    get_args,
    get_origin,
    get_type_hints,
)

from fl_strategies._util import nearest, require_argument
from fl_strategies.errors import InvalidParameter, KnowledgeMismatch, between, require

Scalar: TypeAlias = str | int | float | bool

__all__ = ["Options", "Setting", "group", "option", "variants"]

TYPE_NAMES: Final[Mapping[type, str]] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def option(
    default: object,
    meaning: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    """Define a setting; its annotation gives its type, and a `Literal` its choices.

    A setting that may be None is omitted from a configuration by 0 or an empty text; one whose
    default is `dataclasses.MISSING` must be given.
    """
    bounds = {"at least": least, "greater than": above, "at most": most, "below": below}
    given = {words: bound for words, bound in bounds.items() if bound is not None}
    metadata = {"meaning": meaning, "bounds": given}
    return field(default=default, metadata=metadata)


def group(kind: "type[Options]") -> Any:
    """Define options that exist if any of them is given, and are None otherwise."""
    return field(default=None, metadata={"group": kind})


def variants(key: str, meaning: str, **kinds: "type[Options] | None") -> Any:
    """Define options of one of several kinds, of which `key` names one; the first by default.

    None stands for no options at all.
    """
    first = next(iter(kinds.values()))
    named = {"key": key, "meaning": meaning, "variants": MappingProxyType(kinds)}
    return field(default_factory=first or (lambda: None), metadata=named)


@dataclass(frozen=True)
class Setting:
    """One setting as configurations have it; 0 or an empty text stands for None."""

    key: str
    kind: type
    default: Scalar
    meaning: str
    choices: tuple[str, ...]
    optional: bool

    def check(self, owner: str, value: object) -> Scalar:
        """Return a value of the setting's type; a whole number may stand for a number."""
        if self.kind is float and type(value) is int:
            value = float(value)
        require(type(value) is self.kind, owner, self.key, TYPE_NAMES[self.kind], value)
        if isinstance(value, float):
            require(math.isfinite(value), owner, self.key, "finite", value)
        return value  # type: ignore[return-value]

    def parse(self, owner: str, text: str) -> Scalar:
        """Read a value from the command line."""
        try:
            if self.kind is bool:
                return {"true": True, "false": False}[text.lower()]
            return self.kind(text)  # type: ignore[no-any-return]
        except (ValueError, KeyError):
            rule = TYPE_NAMES[self.kind]
        raise InvalidParameter(f"{owner}: {self.key} must be {rule}, got {text!r}.")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of all options; subclasses add fields, and rules about several of them.

    Examples
    --------
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Walk(Options):
    ...     num_steps: int = option(10, "steps to take", least=1)
    >>> Walk.from_config({"num-steps": 3})
    Walk(num_steps=3)
    >>> Walk(num_steps=0)
    Traceback (most recent call last):
    fl_strategies.errors.InvalidParameter: Walk: num_steps must be at least 1, got 0.
    """

    owner: ClassVar[str] = ""
    """Owner of the options, for errors; by default the class itself."""
    names_keys: ClassVar[bool] = False
    """Whether errors name settings by their keys instead of their Python names."""
    variant_field: ClassVar[str] = ""
    """For a kind that has several names among variants: the field that tells its own."""

    def __new__(cls, *_: object, **given: object) -> Self:
        """Refuse a misspelt option by the name that was probably meant."""
        names = _names(cls)
        for name in given:
            if name not in names:
                require_argument(cls._owner(), name, names, _inner(cls, name))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check type and rule of every setting."""
        for item in fields(self):
            if "bounds" in item.metadata:
                object.__setattr__(self, item.name, self._checked(item))
            kinds = {*item.metadata.get("variants", {}).values()}
            if "group" in item.metadata:
                kinds = {None, item.metadata["group"]}
            value = getattr(self, item.name)
            fits = not kinds or (None if value is None else type(value)) in kinds
            self.require(item.name, fits, "one of its kinds")

    def _checked(self, item: "Field[Any]") -> object:
        value = getattr(self, item.name)
        kind, choices, optional = _annotated(type(self), item.name)
        if value is None and optional:
            return None
        if kind is float and type(value) is int:
            value = float(value)
        owner, name = self._owner(), key_of(item.name) if self.names_keys else item.name
        if choices:
            require(value in choices, owner, name, f"one of {', '.join(choices)}", value)
        # Subclasses of the plain types, such as NumPy's numbers, are not for the wire.
        require(type(value) is kind, owner, name, TYPE_NAMES[kind], value)
        finite = not isinstance(value, float) or math.isfinite(value)
        require(finite, owner, name, "finite", value)
        bounds = item.metadata["bounds"]
        holds = all(_HOLDS[words](value, bound) for words, bound in bounds.items())
        require(holds, owner, name, _rule(bounds), value)
        return value

    def require(self, name: str, holds: bool, rule: str) -> None:
        """Raise `InvalidParameter` for a setting unless its rule holds."""
        require(holds, self._owner(), name, rule, getattr(self, name))

    @classmethod
    def _owner(cls) -> str:
        return cls.owner or cls.__name__

    @classmethod
    def settings(cls) -> Mapping[str, Setting]:
        """Return all settings by their keys, those of all variants too."""
        return _settings(cls)

    def to_config(self) -> dict[str, Scalar]:
        """Return what is set, by kebab-case keys; what is None by default is missing."""
        config: dict[str, Scalar] = {}
        inner: dict[str, Scalar] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if "variants" in item.metadata:
                config[item.metadata["key"]] = _variant(item, value)
            if isinstance(value, Options) and item.metadata:
                inner |= value.to_config()
            elif "bounds" in item.metadata and (value, item.default) != (None, None):
                # None by choice, not by default, must be stated.
                absent = _annotated(type(self), item.name)[0]()
                config[key_of(item.name)] = absent if value is None else value
        # Of a key that both have, the inner value is the one that counts.
        return config | inner

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Self:
        """Read a configuration; keys of others do not matter, and missing ones default."""
        known, owner = cls.settings(), cls._owner()
        given = {key: s.check(owner, config[key]) for key, s in known.items() if key in config}
        used: set[str] = set()
        options = cls._build(given, used)
        for key in given.keys() - used:
            require(
                given[key] == known[key].default,
                owner,
                key,
                "omitted with these settings, which do not use it",
                given[key],
            )
        return options

    @classmethod
    def completed(cls, given: Mapping[str, object]) -> dict[str, Scalar]:
        """Return a configuration of what is given in Python, where None is possible.

        Numbers in a row become text with commas. Raises `InvalidParameter` for unknown keys.
        """
        known = cls.settings()
        for key in given:
            require_setting(cls._owner(), key, known)
        values: dict[str, Any] = {
            key: known[key].kind() if value is None else value for key, value in given.items()
        }
        return {
            key: ",".join(map(str, value)) if isinstance(value, list | tuple) else value
            for key, value in values.items()
        }

    @classmethod
    def received(cls, config: Mapping[str, object]) -> Self:
        """Read what a server sent; raise `KnowledgeMismatch` for anything unreasonable."""
        try:
            return cls.from_config(config)
        except InvalidParameter as error:
            raise KnowledgeMismatch(f"Server: {str(error)[:400]}") from error

    @classmethod
    def _build(cls, given: Mapping[str, Scalar], used: set[str], **decided: object) -> Self:
        """Make the options of what is given, and note in `used` which keys count."""
        values: dict[str, object] = dict(decided)
        for item in fields(cls):
            key = key_of(item.name)
            if "variants" in item.metadata:
                values[item.name] = _build_variant(cls._owner(), item, given, used)
            elif "group" in item.metadata:
                shared = {key_of(own.name) for own in fields(cls) if "bounds" in own.metadata}
                values[item.name] = _build_group(item.metadata["group"], given, used, shared)
            elif "bounds" in item.metadata and (key in given or item.default is MISSING):
                used.add(key)
                value = given.get(key, cls.settings()[key].default)
                absent = cls.settings()[key].optional and not value
                values[item.name] = None if absent else value
        return cls(**values)


def require_setting(owner: str, key: str, known: Collection[str]) -> None:
    """Raise `InvalidParameter`, with the nearest name, unless a key is known."""
    if key in known:
        return
    hint = nearest(key, known)
    raise InvalidParameter(f"{owner}: key must be a known setting, got {key!r}. {hint}")


def key_of(name: str) -> str:
    """Return the kebab-case key of a snake_case name."""
    return name.replace("_", "-")


def _names(kind: type[Options]) -> list[str]:
    return [item.name for item in fields(kind)]


def _inner(kind: type[Options], name: str) -> str:
    """Return a hint naming the nested options class that defines `name`, or ""."""
    for item in fields(kind):
        inner = [*item.metadata.get("variants", {}).values(), item.metadata.get("group")]
        for other in filter(None, inner):
            if name in _names(other):
                return f"Write {item.name}={other.__name__}({name}=...)."
    return ""


def _build_variant(
    owner: str, item: "Field[Any]", given: Mapping[str, Scalar], used: set[str]
) -> Options | None:
    kinds, key = item.metadata["variants"], item.metadata["key"]
    name = given.get(key, next(iter(kinds)))
    used.add(key)
    require(name in kinds, owner, key, f"one of {', '.join(kinds)}", name)
    kind = kinds[name]
    if kind is None:
        return None
    several = sum(other is kind for other in kinds.values()) > 1
    built: Options = kind._build(given, used, **({kind.variant_field: name} if several else {}))
    return built


def _build_group(
    kind: type[Options], given: Mapping[str, Scalar], used: set[str], shared: set[str]
) -> Options | None:
    """Build a group if anything of it is given that is not also a setting beside it."""
    own = {key: setting for key, setting in kind.settings().items() if key not in shared}
    if all(given.get(key, setting.default) == setting.default for key, setting in own.items()):
        used.update(own)
        return None
    return kind._build(given, used)


def _variant(item: "Field[Any]", value: Options | None) -> str:
    kinds = item.metadata["variants"]
    names = [n for n, kind in kinds.items() if (None if value is None else type(value)) is kind]
    if value is None or len(names) == 1:
        return str(names[0])
    return str(getattr(value, value.variant_field))


_KNOWN: dict[type[Options], Mapping[str, Setting]] = {}
_TYPES: dict[type[Options], Mapping[str, tuple[type, tuple[str, ...], bool]]] = {}


def _settings(kind: type[Options]) -> Mapping[str, Setting]:
    if kind not in _KNOWN:
        _KNOWN[kind] = MappingProxyType(dict(_walk(kind)))
    return _KNOWN[kind]


def _walk(kind: type[Options]) -> Iterator[tuple[str, Setting]]:
    for item in fields(kind):
        meta = item.metadata
        if "bounds" in meta:
            setting = _setting(kind, item)
            yield setting.key, setting
        if "variants" in meta:
            names = tuple(meta["variants"])
            yield (
                meta["key"],
                Setting(meta["key"], str, names[0], meta["meaning"], names, False),
            )
        for inner in dict.fromkeys([*meta.get("variants", {}).values(), meta.get("group")]):
            if inner is not None:
                yield from _walk(inner)


def _setting(kind: type[Options], item: "Field[Any]") -> Setting:
    type_, choices, optional = _annotated(kind, item.name)
    default = type_() if item.default in (None, MISSING) else item.default
    meaning = item.metadata["meaning"]
    return Setting(key_of(item.name), type_, default, meaning, choices, optional)


def _annotated(kind: type[Options], name: str) -> tuple[type, tuple[str, ...], bool]:
    """Return type, choices and whether None is allowed, by a field's annotation."""
    if kind not in _TYPES:
        hints = get_type_hints(kind)
        own = [item.name for item in fields(kind) if "bounds" in item.metadata]
        _TYPES[kind] = {name: _type_of(hints[name]) for name in own}
    return _TYPES[kind][name]


def _type_of(annotation: Any) -> tuple[type, tuple[str, ...], bool]:
    parts = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    optional = type(None) in parts
    (plain,) = (part for part in parts if part is not type(None))
    if get_origin(plain) is Literal:
        return str, get_args(plain), optional
    return plain, (), optional


_HOLDS: Final[Mapping[str, Any]] = {
    "at least": lambda value, bound: value >= bound,
    "greater than": lambda value, bound: value > bound,
    "at most": lambda value, bound: value <= bound,
    "below": lambda value, bound: value < bound,
}


def _rule(bounds: Mapping[str, float]) -> str:
    """Return the rule for a number.

    Examples
    --------
    >>> _rule({"at least": 1, "at most": 9})
    'from 1 to 9'
    """
    if tuple(bounds) == ("at least", "at most"):
        return between(bounds["at least"], bounds["at most"])
    return " and ".join(f"{words} {bound}" for words, bound in bounds.items())
