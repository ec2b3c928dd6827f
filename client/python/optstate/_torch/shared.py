"""Attributes that all wrappers of an optimizer have in common."""

from __future__ import annotations

from typing import Any


class Shared:
    """An optimizer's attribute that is stored in its Served, and so shared by all wrappers."""

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, _: type | None = None) -> Any:
        return self if optimizer is None else getattr(optimizer._served, self._name)

    def __set__(self, optimizer: Any, value: Any) -> None:
        setattr(optimizer._served, self._name, value)

    def __delete__(self, optimizer: Any) -> None:
        delattr(optimizer._served, self._name)
