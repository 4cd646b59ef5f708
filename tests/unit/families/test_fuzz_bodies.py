"""What is sent to engines by chance comes again with the same seed."""

import json
import random

from tests.families.fuzz.bodies import chat, completion
from tests.families.fuzz.parts import MAKERS
from tests.families.fuzz.pooling_bodies import pooling
from tests.families.fuzz.targets import adapting


def test_a_seed_says_what_is_sent() -> None:
    """So that what ended an engine can be sent again."""
    for make in (chat, completion, pooling, adapting):
        bodies = [json.dumps(make(random.Random(seed))) for seed in range(30)]
        assert bodies == [json.dumps(make(random.Random(seed))) for seed in range(30)]
        assert len(set(bodies)) > 20


def test_every_odd_part_can_be_made() -> None:
    for maker in MAKERS:
        for seed in range(12):
            assert json.dumps(maker(random.Random(seed)))
