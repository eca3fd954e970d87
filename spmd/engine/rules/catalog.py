"""All rules: importing this fills the tables."""

from __future__ import annotations

from spmd.engine.rules import (
    attention,
    bags,
    elements,
    empty,
    lists,
    lookup,
    norms,
    products,
    random,
    reductions,
    shapes,
    softmax,
)
from spmd.engine.rules.compositions import decomposition
from spmd.engine.rules.lists import is_list_operator, place_lists
from spmd.engine.rules.local_rules import LOCAL_RULES, Local, Site
from spmd.engine.rules.placement_rules import PLACEMENT_RULES, OperatorCall, Row, choose, strided, tensors_of
from spmd.engine.rules.random import is_random, with_generator
from spmd.engine.rules.shapes import is_view
from spmd.engine.rules.uneven_views import placed_view

__all__ = [
    "LOCAL_RULES",
    "PLACEMENT_RULES",
    "Local",
    "OperatorCall",
    "Row",
    "Site",
    "attention",
    "bags",
    "choose",
    "decomposition",
    "elements",
    "empty",
    "is_list_operator",
    "is_random",
    "is_view",
    "lists",
    "lookup",
    "norms",
    "place_lists",
    "placed_view",
    "products",
    "random",
    "reductions",
    "shapes",
    "softmax",
    "strided",
    "tensors_of",
    "with_generator",
]
