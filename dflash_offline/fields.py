"""The run file's fields in words: what a field allows, and what is wrong with a value, each in one line.

Both come from the pydantic model itself, so that an error, the reference page and ``dflash-offline init`` agree.
"""

import difflib
import re
import types
import typing
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

_NAMES = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    bool: ("true or false", "true or false"),
}


def allowed(field: FieldInfo) -> str:
    """What a field may be set to, for example ``a list of whole numbers, "all" or "cpu"``."""
    return _words(field.annotation, field.metadata)


def _words(annotation: Any, metadata: typing.Iterable[Any] = (), *, plural: bool = False) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        inner: list[Any] = []
        for item in arguments[1:]:
            inner.extend(item.metadata if isinstance(item, FieldInfo) else [item])
        return _words(arguments[0], [*inner, *metadata], plural=plural)
    if origin in (typing.Union, types.UnionType, Literal):
        return _join(_options(annotation, metadata))
    if origin is list:
        at_least = " (at least one)" if any(isinstance(item, MinLen) for item in metadata) else ""
        return f"a list of {_words(arguments[0], plural=True)}{at_least}"
    if origin is tuple:
        return f"a list of {len(arguments)} {_words(arguments[0], plural=True)}"
    if origin is dict or annotation is dict:
        values = f" of {_words(arguments[1])}" if arguments and typing.get_origin(arguments[1]) is Literal else ""
        return ("tables" if plural else "a table") + values
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a section"
    return _NAMES[annotation][plural] + _range(metadata)


def _options(annotation: Any, metadata: typing.Iterable[Any]) -> list[str]:
    if typing.get_origin(annotation) is Literal:
        return [f'"{item}"' for item in typing.get_args(annotation)]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [words for item in typing.get_args(annotation) if item is not type(None) for words in _options(item, metadata)]
    return [_words(annotation, metadata)]


def _range(metadata: typing.Iterable[Any]) -> str:
    bounds = []
    for item in metadata:
        match item:
            case Gt(gt=low):
                bounds.append(f"above {low}")
            case Ge(ge=low):
                bounds.append(f"at least {low}")
            case Lt(lt=high):
                bounds.append(f"below {high}")
            case Le(le=high):
                bounds.append(f"at most {high}")
    return " " + " and ".join(bounds) if bounds else ""


def _join(options: list[str]) -> str:
    return options[0] if len(options) == 1 else ", ".join(options[:-1]) + " or " + options[-1]


def explain(model: type[BaseModel], tables: dict[str, Any], error: ValidationError) -> list[str]:
    """Every fault of a run file as one line, each field once: ``[train]: unknown key 'lrr'; did you mean 'lr'?``"""
    lines: dict[tuple[str, ...], str] = {}
    for fault in error.errors():
        path, field = _locate(model, fault["loc"])
        if path not in lines:
            lines[path] = _line(model, tables, fault, path, field)
    return list(lines.values())


def _locate(model: type[BaseModel], location: tuple[Any, ...]) -> tuple[tuple[str, ...], FieldInfo | None]:
    """Cut union branches and list indices off a pydantic location: names of section and key, and the field if known."""
    path: list[str] = []
    field: FieldInfo | None = None
    annotation: Any = model
    for part in location:
        path.append(str(part))
        field = _step(annotation, str(part))
        annotation = None if field is None else field.annotation
        if _section(annotation) is None and _section_of_each(annotation) is None:
            break
    return tuple(path), field


def _step(annotation: Any, name: str) -> FieldInfo | None:
    """The field of that name in a section; in a table of sections every name is one."""
    if (each := _section_of_each(annotation)) is not None:
        return FieldInfo(annotation=each)
    section = _section(annotation)
    assert section is not None
    return section.model_fields.get(name)


def _section(annotation: Any) -> type[BaseModel] | None:
    """The model of a section's field."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _section_of_each(annotation: Any) -> type[BaseModel] | None:
    """The model of every section in a table of sections, ``[hosts.NAME]``."""
    return _section(typing.get_args(annotation)[1]) if typing.get_origin(annotation) is dict else None


def _line(model: type[BaseModel], tables: dict[str, Any], fault: Any, path: tuple[str, ...], field: FieldInfo | None) -> str:
    kind, message = fault["type"], fault["msg"].removeprefix("Value error, ")
    where = f"[{'.'.join(path[:-1])}]: " if path[:-1] else ""
    if kind == "extra_forbidden":
        return where + _unknown(model, path, is_table=isinstance(fault.get("input"), dict))
    if kind == "missing" and field is not None and field.is_required() and len(fault["loc"]) == len(path):
        return f"{where}{path[-1]!r} is missing" if where else f"section [{path[-1]}] is missing"
    if kind == "value_error" or field is None:
        at = where or (f"[{path[0]}]: " if path else "")
        return f"{at}{message}"
    value: Any = tables
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
        return f"{path[-1]} = {_short(value)}: must be a section [{'.'.join(path)}]"
    is_choice = typing.get_origin(field.annotation) is Literal
    options = [item for item in typing.get_args(field.annotation) if is_choice and isinstance(item, str)]
    near = difflib.get_close_matches(str(value), options, n=1)
    return f"{where}{path[-1]} = {_short(value)}: must be {allowed(field)}" + (f"; did you mean {near[0]!r}?" if near else "")


def _short(value: Any) -> str:
    # a URL may hold a password or a key, in front of its host or in its query
    text = re.sub(r"//[^\s'\"]*@", "//...@", repr(value))
    text = re.sub(r"(//[^\s'\"?#]*)[?#][^\s'\"]*", r"\1?...", text)
    return text if len(text) <= 80 else text[:77] + "..."


def _unknown(model: type[BaseModel], path: tuple[str, ...], *, is_table: bool) -> str:
    annotation: Any = model
    for name in path[:-1]:
        field = _step(annotation, name)
        assert field is not None
        annotation = field.annotation
    section = _section(annotation)
    assert section is not None
    fields = section.model_fields
    what = "section" if is_table and len(path) == 1 else "key"
    near = difflib.get_close_matches(path[-1], list(fields), n=1, cutoff=0.5)
    if near:
        return f"unknown {what} {path[-1]!r}; did you mean {near[0]!r}?"
    elsewhere = [
        name
        for name, field in model.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel) and path[-1] in field.annotation.model_fields
    ]
    if elsewhere:
        return f"unknown {what} {path[-1]!r}; it belongs to [{elsewhere[0]}]"
    return f"unknown {what} {path[-1]!r}; known are {', '.join(sorted(fields))}"
