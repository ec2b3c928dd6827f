"""The operations of programs, each a function of one side.

An operation is a module's function with @operation. It is told its arguments, which its draws
make from a random generator, and must do something sensible on any program: indices are taken
modulo what there is. What it returns is compared between the sides.
"""

from programs.operations import (  # noqa: F401  (they register themselves)
    asking,
    checkpoints,
    copies,
    editing,
    gradients,
    grouping,
    scheduling,
    training,
)
