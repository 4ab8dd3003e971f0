"""A forward that computes something else than the model."""

from __future__ import annotations

import pytest

from plait.models import admission


def attend_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are shifted by one token."""
    attend = admission.PackedContext.attend

    def shifted(self, layer, query, key, value, form):
        return attend(self, layer, query, key.roll(1, 1), value, form)

    monkeypatch.setattr(admission.PackedContext, "attend", shifted)
