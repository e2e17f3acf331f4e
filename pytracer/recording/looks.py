"""Which steps a recorder that is always on looks at. It follows from the totals of the steps so far.

| reason  | when                                                                | steps |
|---------|---------------------------------------------------------------------|-------|
| first   | the program begins                                                  | 2     |
| departs | a step went higher than all before it: at once                      | 1     |
| grows   | what is alive as steps end has risen for a while, and still rises   | 6     |
| due     | nothing changes: after 8, 16, 32, ... steps, then after each 4096   | 1     |

A look at a step that grows takes several steps, because a leak is proved by what each of them leaves.
csrc/core/looks.h decides; tests/looks_reference.py does the same in Python.
"""

from typing import Any

from pytracer.data._native import C

Looks, Why = C.Looks, C.Why


def name_of(why: Any) -> str:
    """The reason as files say it; "" for none."""
    return "" if why == Why.NOTHING else str(why.name).lower()
