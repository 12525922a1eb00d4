"""Tiers that are closed at the end of a test."""

import pytest
from tier_pages import LAYOUT

from jaxkv.serving.tiers import Tiers


@pytest.fixture
def open_tiers():
    """Makes Tiers that are closed at the end."""
    made = []

    def make(*tiers, **options):
        made.append(Tiers(tiers, LAYOUT, **options))
        return made[-1]

    yield make
    for tiers in made:
        tiers.close()
