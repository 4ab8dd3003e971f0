"""Values of rows as JSON has them. Torch-free."""

from __future__ import annotations

import math
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

from plait.errors import DataError


def plain(value: Any, column: str, place: str) -> Any:
    """A value of a table as JSON has it (a number that is not finite is None): rows are written to sample files.

    Args:
        column, place: where it stands, for messages.

    Raises:
        DataError: JSON has no such value.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [plain(item, column, place) for item in value]
    if isinstance(value, dict):
        return {str(name): plain(item, column, place) for name, item in value.items()}
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    raise DataError(
        f"{place}: column `{column}` holds {type(value).__name__}, which is neither text nor number; remove the column"
    )
